"""Resources that a run needs, and checks that this machine has them."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.calibration.sensitivity import natural_loss
from rocket_core.config import Stage
from rocket_core.errors import InsufficientDiskError, InsufficientMemoryError, InvalidConfigError
from rocket_core.estimates.batch_size import tokens_per_batch
from rocket_core.estimates.duration import NOMINAL_SPEED, count_operations
from rocket_core.estimates.evaluation_duration import EvaluationSizes
from rocket_core.estimates.footprint import (
    ModelShape,
    ResourceEstimate,
    Workload,
    benchmark_footprint,
    estimate_footprint,
    evaluation_footprint,
)
from rocket_core.estimates.healing import healing_footprint
from rocket_core.estimates.tower_footprint import TowerShape, patch_numbers, tower_workload
from rocket_core.inspection.checks.feasibility import may_be_needless, reach_of_layers
from rocket_core.inspection.checks.model_reach import remark_on_rows
from rocket_core.inspection.headers.model_fields import HEADS, active_part, find_number, input_bytes
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.stages.artifact_size import bytes_beside
from rocket_core.pipeline.stages.evaluate import EvaluationPlan
from rocket_core.pipeline.stages.healing.plan import HealingPlan
from rocket_core.sizes.budget import parameter_budget
from rocket_core.sizes.reachability import Reach
from rocket_core.sizes.target import ByBits, ByFormat, ByRatio, Target
from rocket_core.system.devices import free_memory
from rocket_core.system.machine import free_disk, gibibytes


def estimate_resources(run: Run, windows: int, inputs: CalibrationInputs | None = None) -> ResourceEstimate:
    """Estimate memory and disk from the model's shapes; see `rocket_core.estimates.footprint`.

    Args:
        run: the run.
        windows: calibration samples.
        inputs: the samples, where each has its own shape; None for what is usual.
    """
    return estimate_footprint(_model_shape(run), _workload(run, windows, inputs))


def expected_seconds(
    run: Run, windows: int, healing: HealingPlan | None, plan: EvaluationPlan | None
) -> Mapping[Stage, float]:
    """Return the seconds of each stage on some machine, for their proportions; none if they are not known.

    Args:
        run: the run.
        windows: calibration samples.
        healing: the planned healing; None if nothing is trained.
        plan: the planned evaluation; None if the result is not evaluated.
    """
    counted = count_operations(
        _model_shape(run),
        _workload(run, windows),
        healing=None if healing is None else healing.work,
        evaluation=_evaluation_sizes(run, plan),
    )
    return {stage: operations.duration(NOMINAL_SPEED) for stage, operations in (counted or {}).items()}


def _evaluation_sizes(run: Run, plan: EvaluationPlan | None) -> EvaluationSizes | None:
    if plan is None or plan.how.tasks:
        return None
    text = plan.how.text
    return EvaluationSizes(
        windows=text.count,
        length=text.length,
        stride=text.stride,
        vocabulary=0 if text.windows is None else run.architecture.vocabulary,
        answer_tokens=len(plan.how.prompts) * plan.how.answer_tokens,
    )


def _workload(run: Run, windows: int, inputs: CalibrationInputs | None = None) -> Workload:
    config = run.architecture.model.config.to_dict()
    sizes = {"input_bytes": input_bytes(config, run.architecture.kind)}
    if inputs is not None and inputs.is_separate:
        patches = math.ceil(inputs.numbers("pixel_values") / patch_numbers(config) / windows)
        sizes = {"input_bytes": math.ceil(inputs.stored_bytes / windows), "patches": patches}
    elif run.config.includes_vision:
        sizes = tower_workload(config, run.sequence_length)
    sizes["batch_tokens"] = tokens_per_batch(run.device.type)
    return Workload(config=run.config, windows=windows, sequence_length=run.positions, **sizes)


def _model_shape(run: Run) -> ModelShape:
    model = run.architecture.model
    settings = model.config.to_dict()
    shapes = [tuple(run.architecture.shape(name) for name in block) for block in run.layers]
    parameters = [
        sum(parameter.numel() for parameter in model.get_submodule(run.architecture.block_name(index)).parameters())
        for index in range(len(run.layers))
    ]
    within = tuple(f"{run.architecture.block_name(index)}." for index in range(len(run.layers)))
    tables = (parameter.numel() for name, parameter in model.named_parameters() if not name.startswith(within))
    in_order = run.architecture.is_causal or len(run.architecture.lists) > 1
    in_tower = [index for index in range(len(run.layers)) if run.architecture.list_of(index).in_tower]
    return ModelShape(
        layers=tuple(shapes),
        block_parameters=tuple(count for index, count in enumerate(parameters) if index not in in_tower),
        tower=TowerShape.of(
            (shape for index in in_tower for shape in shapes[index]), (parameters[index] for index in in_tower)
        ),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        hidden_size=int(model.config.get_text_config().hidden_size),
        itemsize=run.dtype.itemsize,
        compute_itemsize=run.compute_dtype.itemsize,
        held_itemsize=None if run.held_dtype is None else run.held_dtype.itemsize,
        largest_table=max(tables, default=None),
        predicts=natural_loss(model, reads_in_order=in_order) == "tokens",
        stored_bytes=run.checkpoint.decoded_bytes,
        tables=tuple(run.architecture.shape(table.name) for table in run.tables),
        active_part=active_part(settings),
        heads=find_number(settings, HEADS) or 0,
    )


def check_resources(run: Run, inputs: CalibrationInputs, output: Path, *, held: int) -> ResourceEstimate:
    """Raise an error if this machine has too few resources to finish a run.

    Args:
        run: the run.
        inputs: calibration samples.
        output: the output folder; need not exist yet.
        held: bytes that a resumed run's work folder takes already.

    Raises:
        InsufficientMemoryError: the device has too little free memory.
        InsufficientDiskError: the disk has too little free space.
    """
    estimate = estimate_resources(run, len(inputs), inputs)
    memory = free_memory(run.device)
    if estimate.memory_bytes > memory:
        raise InsufficientMemoryError(
            f"compressing {run.source.name} needs about {gibibytes(estimate.memory_bytes)} of memory on {run.device}, "
            f"{gibibytes(memory)} are free; use fewer samples, a shorter sequence length or another device"
        )
    disk = free_disk(output)
    if estimate.disk_bytes - held > disk:
        raise InsufficientDiskError(
            f"compressing {run.source.name} needs about {gibibytes(estimate.disk_bytes - held)} of disk at {output}, "
            f"{gibibytes(disk)} are free; free some, write elsewhere, export one artifact only, or lower "
            "statistics_quota_bytes"
        )
    return estimate


def usable_devices(run: Run, memory_bytes: int) -> tuple[torch.device, ...]:
    """Return those of a run's further devices that have free memory for a process each.

    Args:
        run: the run, which fits on its first device.
        memory_bytes: bytes that each process needs.
    """
    usable: list[torch.device] = []
    for device in run.others:
        processes = (run.device, *usable).count(device)
        if (processes + 1) * memory_bytes <= free_memory(device):
            usable.append(device)
    return tuple(usable)


def reach_of_run(run: Run) -> Reach:
    """Return how small the model can become, before its layers are profiled.

    It is what the profile will tell, apart from layers that the model turns out not to call, and from zeros and factors
    where integer codes are limited or not allowed.
    """
    names = [name for block in run.layers for name in block]
    tables = [table.name for table in run.tables] if run.config.decides_tables else []
    target, layers = run.config.target, {name: run.architecture.shape(name) for name in names}
    reach = reach_of_layers(
        layers.values(),
        itemsize=run.dtype.itemsize,
        other_bytes=bytes_beside(run, names + tables),
        quantizes=run.config.quantizes,
        codes=run.config.code_choices,
        only=target if isinstance(target, ByFormat) else None,
        tables=[run.architecture.shape(name) for name in tables],
    )
    is_of_bytes = run.checkpoint.coded is not None and reach.unit == "bytes"
    original = sum(map(run.original_bytes, names + tables)) if is_of_bytes else None
    return replace(reach, original=original, remark=remark_on_rows(layers, run.config))


def decoded_target(run: Run, target: Target) -> Target:
    """Return a target for decoded layers: a ratio of bytes is one of the bytes in the checkpoint."""
    if run.checkpoint.coded is None or not isinstance(target, ByRatio) or run.config.budget != "bytes":
        return target
    names = [name for block in run.layers for name in block]
    if run.config.ratio_counts_tables:
        names += [table.name for table in run.tables]
    budget = parameter_budget(sum(map(run.original_bytes, names)), target.ratio)
    return ByBits(bits=8 * budget / sum(math.prod(run.architecture.shape(name)) for name in names))


def check_target(run: Run) -> None:
    """Raise an error if no choice of candidates reaches the target, before long work starts.

    Raises:
        InfeasibleBudgetError: the target cannot be reached.
    """
    if run.config.target is not None:
        reach_of_run(run).check(run.config.target)


def check_needed(run: Run, target: Target) -> None:
    """Raise an error if the model is as small as requested, so that a compression would change nothing.

    Raises:
        InvalidConfigError: it is.
    """
    is_coded = run.checkpoint.coded is not None
    if may_be_needless(run.config, is_coded=is_coded):
        stored_bytes = run.checkpoint.weights.stored_bytes if is_coded else None
        reach_of_run(run).check_needed(target, stored_bytes=stored_bytes)


def check_benchmark(run: Run) -> int:
    """Raise an error if the model or this machine does not allow the benchmark, before the compression starts.

    Returns:
        Estimated bytes of memory; 0 if none is requested.

    Raises:
        InvalidConfigError: the model does not generate text.
        InsufficientMemoryError: the device has too little free memory for the original and all artifacts together.
    """
    if not run.config.benchmark:
        return 0
    if not run.architecture.is_causal:
        raise InvalidConfigError(
            f"{run.source.name} does not generate text, which a benchmark measures: leave benchmark out"
        )
    needed = benchmark_footprint(_model_shape(run), len(run.config.export)).memory_bytes
    memory = free_memory(run.device)
    if needed > memory:
        raise InsufficientMemoryError(
            f"measuring the speed of {run.source.name} and its artifacts needs all of them in memory, about "
            f"{gibibytes(needed)} on {run.device}, {gibibytes(memory)} are free; leave benchmark out and measure fewer "
            "at a time with `rocket bench`"
        )
    return needed


def check_healing(plan: HealingPlan, model: str, device: torch.device, output: Path) -> int:
    """Raise an error if this machine cannot heal a model, before long work starts.

    Args:
        plan: the planned healing.
        model: name of the original in messages.
        device: device to train on.
        output: the output folder; need not exist yet.

    Returns:
        Estimated bytes of memory.

    Raises:
        InsufficientMemoryError: the device has too little free memory for both models as a whole.
        InsufficientDiskError: the disk has too little free space for a checkpoint.
    """
    estimate = healing_footprint(plan.sizes, call_tokens=plan.call_tokens)
    memory, disk = free_memory(device), free_disk(output)
    if estimate.memory_bytes > memory:
        raise InsufficientMemoryError(
            f"healing needs {model} and the compressed model as a whole, about {gibibytes(estimate.memory_bytes)} of "
            f"memory on {device}, {gibibytes(memory)} are free; use a shorter sequence length or another device"
        )
    if estimate.disk_bytes > disk:
        raise InsufficientDiskError(
            f"healing {model} needs about {gibibytes(estimate.disk_bytes)} of disk at {output}, {gibibytes(disk)} are "
            "free; free some or write elsewhere"
        )
    return estimate.memory_bytes


def check_evaluation(run: Run, plan: EvaluationPlan | None, output: Path) -> int:
    """Raise an error if this machine cannot finish the evaluation, before the compression starts.

    Args:
        run: the run.
        plan: the planned evaluation; None if there is nothing to evaluate.
        output: the output folder; need not exist yet.

    Returns:
        Estimated bytes of memory; 0 without a plan.

    Raises:
        InsufficientMemoryError: the device has too little free memory for the whole model.
        InsufficientDiskError: the disk has too little free space for the dense model's logits.
    """
    if plan is None:
        return 0
    tokens = plan.how.stored_tokens
    model = _model_shape(run)
    if run.device.type == "cpu":
        model = replace(model, compute_itemsize=max(model.compute_itemsize, torch.float32.itemsize))
    estimate = evaluation_footprint(model, tokens=tokens, vocabulary=run.architecture.vocabulary)
    memory, disk = free_memory(run.device), free_disk(output)
    advice = "leave evaluate out and measure elsewhere with `rocket evaluate`"
    if estimate.memory_bytes > memory:
        raise InsufficientMemoryError(
            f"evaluating {run.source.name} needs the whole model, about {gibibytes(estimate.memory_bytes)} of memory "
            f"on {run.device}, {gibibytes(memory)} are free; {advice}"
        )
    if estimate.disk_bytes > disk:
        raise InsufficientDiskError(
            f"evaluating {run.source.name} needs about {gibibytes(estimate.disk_bytes)} of disk at {output}, "
            f"{gibibytes(disk)} are free; lower evaluate.samples, or {advice}"
        )
    return estimate.memory_bytes
