"""The stage that measures sensitivities: forward through the blocks once, and back through them in reverse."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rocket_core.devices import return_freed_memory
from rocket_core.errors import UnsupportedArchitectureError
from rocket_core.inputs import CalibrationInputs
from rocket_core.pipeline.preflight import Run
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.state_cache import StateCache
from rocket_core.pipeline.walk import begin_walk, loaded_block, loaded_surroundings, split_inputs
from rocket_core.pipeline.work_folder import WorkFolder
from rocket_core.recording import Activations
from rocket_core.sensitivity import (
    Loss,
    ScaledGradient,
    Sensitivity,
    SquaredGradients,
    natural_loss,
    output_gradient,
)

# A backward pass holds some thirty numbers per token and hidden unit; of this many tokens they take less memory than
# the weights of a large block.
TOKENS_PER_GRADIENT_BATCH = 2048

_CACHE_NAME = "sensitivity-states"
# What a block costs in the backward pass, in forward passes of it: one more forward, and twice that backward.
_BACKWARD_COST = 3


def measure_sensitivities(
    run: Run,
    calibration: CalibrationInputs,
    work: WorkFolder,
    monitor: Monitor,
    *,
    windows: int = 32,
    loss: Loss | None = None,
) -> dict[str, Sensitivity]:
    """Measures how much the loss minds errors in the output of each layer that is to be compressed.

    For output coordinate j of a layer it is `f_j = E_tokens[g_j^2]`, g the gradient of a window's summed loss; see
    `rocket_core.sensitivity`. Each layer's vector is in the work folder as soon as it is known, and a run that was
    stopped goes on at the block where it stood, to the same bytes (on the CPU, at an equal number of threads).

    It costs one forward and one backward pass of the windows, the latter with a second forward of each block; memory of
    one block's weights with the activations of one batch, and the hidden states of all windows; and, until it is
    complete, `(blocks + 2) * windows * tokens * hidden size` numbers of disk in the dtype of the model.

    Args:
        run: the run.
        calibration: calibration windows of text.
        work: where finished vectors are and go.
        monitor: told of every block and batch.
        windows: how many windows to use, from the first; >= 1.
        loss: `tokens` or `hidden_states`; None takes the first where the model predicts tokens.

    Returns:
        Sensitivities of all layers by name, in model order; all zero for a layer that is never called.

    Raises:
        NonFiniteCalibrationError: NaN or infinity in the gradients of a layer.
        UnsupportedArchitectureError: a block has no backward pass, or the model is no decoder or encoder of text.
        CompressionCancelledError: the caller wants the run to end.
    """
    names = [name for block in run.layers for name in block]
    cache = StateCache(work.path / _CACHE_NAME)
    if any(work.sensitivity(name) is None for name in names):
        chosen = loss or natural_loss(run.architecture.model)
        _refuse_other_than_text(run, calibration)
        _ReversePass(run, calibration[:windows], work, cache, monitor, chosen).complete()
    cache.remove()
    found = {name: work.sensitivity(name) for name in names}
    return {name: sensitivity for name, sensitivity in found.items() if sensitivity is not None}


class _ReversePass:
    """One pass over a model's blocks, forward and back.

    What is on disk says where it stands: hidden states of ever more blocks on the way forward; then gradients, each at
    the input of a block whose layers are known, and hidden states of ever fewer.
    """

    def __init__(
        self,
        run: Run,
        calibration: CalibrationInputs,
        work: WorkFolder,
        cache: StateCache,
        monitor: Monitor,
        loss: Loss,
    ) -> None:
        self._run = run
        self._tokens = calibration.tensors["input_ids"].numel()
        batches = split_inputs(run, calibration, TOKENS_PER_GRADIENT_BATCH)
        self._batches = [batch["input_ids"] for batch in batches]
        self._work = work
        self._cache = cache
        self._monitor = monitor
        self._loss: Loss = loss
        # Below the first block that is compressed nothing need be known.
        self._first = next(index for index, names in enumerate(run.layers) if names)
        self._blocks = len(run.layers)

    def complete(self) -> None:
        """Goes on from where an earlier run stood, to the end."""
        states = begin_walk(self._run, self._batches)
        if self._cache.indices("gradients"):
            self._monitor.skip_to(self._share(self._cache.indices("gradients")[0]))
        else:
            self._go_forward(states)
            self._turn_round(states.hidden)
        states.hidden.clear()
        return_freed_memory()
        position = self._cache.indices("gradients")[0]
        gradients = self._gradients(position)
        for index in reversed(range(self._first, position)):
            self._monitor.step(self._share(index + 1), next(iter(self._run.layers[index]), None))
            self._go_back(states, index, gradients)

    def _go_forward(self, states: Activations) -> None:
        kept = self._cache.indices("hidden")
        begin = 0
        if kept:
            begin = kept[-1]
            entries = self._cache.entries("hidden", begin)
            states.hidden[:] = [entries[_key(batch)].read().to(self._run.device) for batch in range(len(states.hidden))]
            self._monitor.skip_to(begin / self._total)
        elif self._first == 0:
            self._cache.save("hidden", 0, _by_batch(states.hidden))
        for index in range(begin, self._blocks):
            self._monitor.step(index / self._total)
            with loaded_block(self._run, index) as block:
                for batch in range(len(states.hidden)):
                    self._monitor.pulse()
                    states.step(block, index, batch)
            if index + 1 >= self._first:
                self._cache.save("hidden", index + 1, _by_batch(states.hidden))

    def _turn_round(self, outputs: Sequence[Tensor]) -> None:
        """Takes the gradient of the loss to the output of the last block."""
        self._monitor.step(self._blocks / self._total)
        blocks = self._run.architecture.blocks
        gradients = []
        with loaded_surroundings(self._run, head=True) as model:
            for number, (tokens, hidden) in enumerate(zip(self._batches, outputs, strict=True)):
                self._monitor.pulse()
                gradients.append(output_gradient(model, blocks, self._loss, tokens, hidden, seed=number))
        self._cache.save("gradients", self._blocks, _scaled_by_batch(gradients))
        self._cache.drop("hidden", self._blocks)

    def _go_back(self, states: Activations, index: int, gradients: list[ScaledGradient]) -> None:
        """Takes the gradients, in place, from the output of a block to its input, and keeps those of its layers."""
        inputs = self._cache.entries("hidden", index)
        names = self._run.layers[index]
        squares = self._squares(names)
        with loaded_block(self._run, index) as block, squares.watching():
            for batch, gradient in enumerate(gradients):
                self._monitor.pulse()
                hidden = inputs[_key(batch)].read().to(self._run.device)
                call = states.calls[batch][index]
                gradients[batch] = squares.pull_back(block, call, hidden, gradient, batch=batch)
        for name in names:
            curvature = squares.total(name) / self._tokens
            self._work.save_sensitivity(name, Sensitivity(curvature=curvature))
        # Saved before the one that it was computed from is removed: at any moment one of them is there.
        self._cache.save("gradients", index, _scaled_by_batch(gradients))
        self._cache.drop("gradients", index + 1)
        self._cache.drop("hidden", index)

    def _squares(self, names: Sequence[str]) -> SquaredGradients:
        architecture = self._run.architecture
        layers: dict[str, nn.Module] = {name: architecture.model.get_submodule(name) for name in names}
        return SquaredGradients(layers=layers, widths={name: architecture.shape(name)[1] for name in names})

    def _gradients(self, index: int) -> list[ScaledGradient]:
        entries = self._cache.entries("gradients", index)
        exponents = entries.pop("exponents").read().tolist()
        return [
            ScaledGradient(values=entries[_key(batch)].read().to(self._run.device), exponent=exponent)
            for batch, exponent in enumerate(exponents)
        ]

    @property
    def _total(self) -> int:
        """Cost of the whole pass, in forward passes of a block."""
        return self._blocks + 1 + _BACKWARD_COST * (self._blocks - self._first)

    def _share(self, position: int) -> float:
        """Share of the pass that is done when the gradients stand at the input of block `position`."""
        return (self._blocks + 1 + _BACKWARD_COST * (self._blocks - position)) / self._total


def _refuse_other_than_text(run: Run, calibration: CalibrationInputs) -> None:
    if len(run.architecture.lists) > 1 or set(calibration.tensors) != {"input_ids"}:
        raise UnsupportedArchitectureError(
            f"sensitivities of {run.architecture.class_name} cannot be measured: only those of decoders and encoders "
            "of text can; take objective whitened"
        )


def _key(batch: int) -> str:
    return f"batch.{batch:05}"


def _by_batch(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {_key(batch): tensor for batch, tensor in enumerate(tensors)}


def _scaled_by_batch(gradients: Sequence[ScaledGradient]) -> dict[str, Tensor]:
    exponents = torch.tensor([gradient.exponent for gradient in gradients])
    return {"exponents": exponents, **_by_batch([gradient.values for gradient in gradients])}
