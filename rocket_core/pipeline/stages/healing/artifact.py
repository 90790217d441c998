"""Healing of a `rocket` artifact: what it stores as numbers is trained towards the dense model's predictions.

Both models are in memory as a whole, and one after the other reads every batch. A run that was stopped resumes at its
last checkpoint; the result is identical to the byte on a CPU with the same number of threads.
"""

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rocket_core.checkpoint import TensorEntry, open_checkpoint
from rocket_core.checkpoint.reader import DTYPES
from rocket_core.errors import CheckpointFormatError, CompressionCancelledError, InvalidConfigError
from rocket_core.evaluation import ModelFolder, load_model
from rocket_core.healing import Trainer, recompute_blocks
from rocket_core.hf.names import disk_keys
from rocket_core.layers import StoredLinear
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.stages.healing.plan import HealingPlan
from rocket_core.pipeline.state.healing_state import HealingState
from rocket_core.refinement import ScaledLinear, close_values, continuous_names, open_values, round_values
from rocket_core.report.healing import HealingPoint, HealingReport

# Points of the loss curve.
_POINTS = 100


def heal_artifact(
    plan: HealingPlan,
    artifact: ModelFolder,
    original: ModelFolder,
    device: torch.device,
    state: HealingState,
    monitor: Monitor,
) -> tuple[dict[str, TensorEntry], HealingReport]:
    """Train the numbers that an artifact stores, and norms and biases.

    Args:
        plan: the text and the schedule.
        artifact: the `rocket` artifact, which is left as it is.
        original: the dense model that it was made from.
        device: device to train on: in float32 on a CPU, with products in bfloat16 elsewhere.
        state: state on disk.
        monitor: notified of every step.

    Returns:
        Where the healed tensors are, by their names in the artifact, with its dtypes and shapes; and the report.

    Raises:
        CompressionCancelledError: the caller has cancelled the run; a checkpoint was stored.
        InvalidConfigError: the artifact stores nothing that can be trained.
        CheckpointError: weights are missing or damaged.
        NonFiniteCalibrationError: the divergence is not finite.
    """
    finished = finished_healing(state, monitor)
    if finished is not None:
        return finished
    student = load_model(artifact, device)
    names = _trained_names(student)
    if not names:
        raise InvalidConfigError(
            f"{artifact.path} stores nothing but integer codes, and has no norm or bias: nothing can be healed"
        )
    keys = disk_keys(student, names)
    stored = _stored_entries(artifact, keys)
    dtypes = {name: DTYPES[entry.dtype] for name, entry in stored.items()}
    trainer = _trainer(plan, student, dtypes, original, device)
    with _saving(trainer, state):
        _take_steps(plan, trainer, state, monitor)
    trainer.take_best()
    trained = sum(int(torch.count_nonzero(value)) for value in trainer.values.values())
    close_values(student)
    tensors = student.state_dict()
    healed = {keys[name]: tensors[name].to("cpu", dtypes[name]) for name in names}
    state.save_result(healed, _report(plan, trainer, trained))
    result = state.result()
    assert result is not None, "it has been stored"
    return result


def finished_healing(state: HealingState, monitor: Monitor) -> tuple[dict[str, TensorEntry], HealingReport] | None:
    """Return what `heal_artifact` returned in an earlier run, and report its loss curve again; None if unfinished."""
    finished = state.result()
    if finished is not None:
        for point in finished[1].curve:
            monitor.observer.on_healing(point)
    return finished


def _trained_names(model: PreTrainedModel) -> list[str]:
    """Return the names in the state dict of what is trained: tensors of stored layers, norms and biases.

    Matrices that stayed dense have nothing to recover from, and embeddings would take most of the memory.
    """
    tensors = model.state_dict()
    return sorted(name for name in continuous_names(model) if _is_trained(_owner(model, name), tensors[name]))


def _is_trained(module: nn.Module, tensor: Tensor) -> bool:
    return tensor.ndim == 1 or isinstance(module, StoredLinear | ScaledLinear)


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _stored_entries(artifact: ModelFolder, keys: Mapping[str, str]) -> dict[str, TensorEntry]:
    """Return the location of each trained tensor in the files, by its name in the state dict."""
    entries = open_checkpoint(artifact.path).entries
    absent = next((key for key in keys.values() if key not in entries), None)
    if absent is not None:
        raise CheckpointFormatError(f"{artifact.path} stores {absent} under another name, so that it cannot be healed")
    return {name: entries[key] for name, key in keys.items()}


def _trainer(
    plan: HealingPlan,
    student: PreTrainedModel,
    dtypes: Mapping[str, torch.dtype],
    original: ModelFolder,
    device: torch.device,
) -> Trainer:
    teacher = load_model(original, device)
    if device.type == "cpu":
        nn.Module.float(teacher)
    open_values(student)
    values = {}
    for name, parameter in student.named_parameters():
        if parameter.requires_grad and _is_trained(_owner(student, name), parameter):
            values[name] = parameter
        else:
            parameter.requires_grad_(False)
    teacher.requires_grad_(False)
    if plan.sizes.recomputes(plan.call_tokens):
        recompute_blocks(student.get_submodule(name) for name in plan.blocks)
    rounding = functools.partial(round_values, student, dtypes)
    return Trainer(student, teacher, values, plan.text, plan.schedule, rounding)


@contextmanager
def _saving(trainer: Trainer, state: HealingState) -> Iterator[None]:
    """Restore the last checkpoint, and store one if the caller cancels."""
    checkpoint = state.checkpoint()
    if checkpoint is not None:
        trainer.restore(checkpoint)
    try:
        yield
    except CompressionCancelledError:
        state.save_checkpoint(trainer.state())
        raise


def _take_steps(plan: HealingPlan, trainer: Trainer, state: HealingState, monitor: Monitor) -> None:
    steps = plan.schedule.steps
    if trainer.done > 0:
        monitor.skip_to(trainer.done)
    # Also the points of the run that this one resumes.
    reported = 0
    while not trainer.is_finished:
        trainer.advance()
        if state.is_due:
            state.save_checkpoint(trainer.state())
        curve = _curve(plan, trainer)
        for point in curve[reported:]:
            monitor.observer.on_healing(point)
        reported = len(curve)
        monitor.step(trainer.done, f"step {trainer.step:,} of {steps:,}")


def _curve(plan: HealingPlan, trainer: Trainer) -> tuple[HealingPoint, ...]:
    """Return the loss curve so far; points are only added while training continues."""
    every = math.ceil(plan.schedule.steps / _POINTS)
    points = [
        HealingPoint(step=stop, tokens=stop * plan.step_tokens, training=max(0.0, math.fsum(losses) / len(losses)))
        for start in range(0, trainer.step, every)
        for stop in [min(start + every, plan.schedule.steps)]
        if stop <= trainer.step
        for losses in [trainer.losses[start:stop]]
    ]
    points += [
        HealingPoint(step=step, tokens=step * plan.step_tokens, held_out=max(0.0, value))
        for step, value in zip(trainer.measured_at, trainer.held_out, strict=False)
    ]
    return tuple(sorted(points, key=lambda point: point.order))


def _report(plan: HealingPlan, trainer: Trainer, trained: int) -> HealingReport:
    return HealingReport(
        dataset=plan.dataset,
        seed=plan.schedule.seed,
        sequence_length=plan.length,
        windows=len(plan.text.training),
        held_out_windows=len(plan.text.held_out),
        tokens=plan.schedule.steps * plan.step_tokens,
        steps=plan.schedule.steps,
        learning_rate=trainer.learning_rate,
        trained_values=trained,
        divergence_before=max(0.0, trainer.held_out[0]),
        divergence_after=max(0.0, min(trainer.held_out)),
        kept_step=trainer.best_step,
        text_sha256=hashlib.sha256(plan.windows.numpy().tobytes()).hexdigest(),
        curve=_curve(plan, trainer),
    )
