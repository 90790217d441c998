"""Walking the dense model block by block: only one block's weights are in memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from rocket_core.calibration import (
    Activations,
    InputGroup,
    collect_statistics,
    find_input_groups,
    record_block_inputs,
)
from rocket_core.devices import return_freed_memory
from rocket_core.footprint import TOKENS_PER_BATCH
from rocket_core.pipeline.preflight import Run
from rocket_core.whitening import GramStatistics


class BlockWalk:
    """The hidden states of all calibration windows, on their way through the dense model.

    Args:
        run: the run.
        tokens: calibration windows.
        on_batch: called before each batch goes through a block; on a slow device a block takes long.
    """

    def __init__(self, run: Run, tokens: Int64[Tensor, "windows tokens"], on_batch: Callable[[], None]) -> None:
        self._run = run
        self._on_batch = on_batch
        self._tokens = tokens
        self._activations: Activations | None = None
        self._position = 0

    def advance_to(self, index: int) -> None:
        """Brings the hidden states to the input of block `index`."""
        self._begin()
        while self._position < index:
            with loaded_block(self._run, self._position) as block:
                for batch in range(len(self._states.hidden)):
                    self._step(block, self._position, batch)
            self._position += 1

    def statistics(
        self, index: int, layers: tuple[str, ...], *, input_grams: bool
    ) -> tuple[dict[str, GramStatistics], dict[str, str]]:
        """Collects the Gram matrices of a block's layers while taking the hidden states through it.

        Args:
            index: the block, where the walk stands.
            layers: names of the layers to look at.
            input_grams: whether the Gram matrices of the inputs are wanted even where those of the outputs are smaller.

        Returns:
            Statistics by layer, and for each layer the first one that reads the same input. A layer that the model
            never calls is in neither.
        """
        self.advance_to(index)
        prefix = f"{self._run.architecture.blocks_name}.{index}."
        states = self._states
        with loaded_block(self._run, index) as block:
            modules = {name: block.get_submodule(name.removeprefix(prefix)) for name in layers}
            shapes = {name: self._run.architecture.shape(name) for name in layers}
            groups = find_input_groups(modules, shapes, lambda: states.run(block, index, 0))
            if input_grams:
                groups = tuple(InputGroup(members=group.members, from_output=False) for group in groups)
            statistics = collect_statistics(
                modules,
                groups,
                lambda batch: self._step(block, index, batch),
                batches=len(states.hidden),
                dtype=self._run.precision,
            )
        self._position = index + 1
        return statistics, _leaders(groups)

    def _step(self, block: nn.Module, index: int, batch: int) -> None:
        self._on_batch()
        self._states.step(block, index, batch)

    @property
    def _states(self) -> Activations:
        assert self._activations is not None
        return self._activations

    def _begin(self) -> None:
        if self._activations is not None:
            return
        self._activations = begin_walk(self._run, split_windows(self._run, self._tokens, TOKENS_PER_BATCH))


@contextmanager
def loaded_block(run: Run, index: int) -> Iterator[nn.Module]:
    """A block with its weights, for as long as the context lasts."""
    block = run.architecture.blocks[index]
    run.loader.load([f"{run.architecture.blocks_name}.{index}"])
    try:
        yield block
    finally:
        run.loader.unload(block)
        return_freed_memory()


@contextmanager
def loaded_surroundings(run: Run, *, head: bool) -> Iterator[PreTrainedModel]:
    """The model with the weights of all but its blocks, for as long as the context lasts.

    Args:
        run: the run.
        head: whether the output embeddings are wanted too; recording stops before they are called.
    """
    model = run.architecture.model
    output = model.get_output_embeddings()
    names = [name for name in _modules_outside_blocks(run) if head or model.get_submodule(name) is not output]
    run.loader.load(names)
    _move_buffers(model, run.device)
    try:
        yield model
    finally:
        for name in names:
            run.loader.unload(model.get_submodule(name))
        return_freed_memory()


def split_windows(
    run: Run, tokens: Int64[Tensor, "windows tokens"], tokens_per_batch: int
) -> list[Int64[Tensor, "_ tokens"]]:
    """Windows of text in batches of at most so many tokens, on the device; a window is never cut."""
    size = max(1, tokens_per_batch // run.sequence_length)
    return [batch.to(run.device) for batch in torch.split(tokens, size)]


def begin_walk(run: Run, batches: Sequence[Int64[Tensor, "_ tokens"]]) -> Activations:
    """Takes windows of text to the first block, and records how the model would call each block."""
    with loaded_surroundings(run, head=False) as model:
        return record_block_inputs(model, run.architecture.blocks, batches)


def _modules_outside_blocks(run: Run) -> list[str]:
    """Modules that own parameters and belong to no block."""
    return [
        name
        for name, module in run.architecture.model.named_modules()
        if any(parameter is not None for parameter in module._parameters.values())
        and not f"{name}.".startswith(f"{run.architecture.blocks_name}.")
    ]


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _leaders(groups: tuple[InputGroup, ...]) -> dict[str, str]:
    return {name: group.members[0] for group in groups for name in group.members}
