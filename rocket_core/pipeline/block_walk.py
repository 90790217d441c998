"""Block-by-block walk through the dense model, with only one block's weights in memory."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rocket_core.calibration.experts import ExpertInputs, find_experts
from rocket_core.calibration.grams import InputGroup, collect_statistics, find_input_groups, sum_inputs
from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.calibration.sensitivity import Sensitivity
from rocket_core.calibration.token_weights import PROFILE_POWER, TokenWeights
from rocket_core.estimates.batch_size import tokens_per_batch
from rocket_core.experts import visiting
from rocket_core.linalg.whitening import GramStatistics
from rocket_core.models.block_calls import Activations, placeholders, record_block_inputs, run_after
from rocket_core.models.block_lists import BlockList
from rocket_core.models.held_states import HeldStates
from rocket_core.pipeline.context import Run
from rocket_core.system.process_memory import return_freed_memory, return_grown_memory


class BlockWalk:
    """The hidden states of all calibration samples while they pass through the dense model.

    Args:
        run: the run.
        inputs: calibration inputs; a tensor holds windows of text.
        on_batch: called before each batch goes through a block, because a block takes long on a slow device.
        sensitivities: what is known of a layer; by it tokens are weighted.
    """

    def __init__(
        self,
        run: Run,
        inputs: CalibrationInputs | Tensor,
        on_batch: Callable[[], None],
        sensitivities: Callable[[str], Sensitivity | None] = lambda _layer: None,
    ) -> None:
        self._sensitivities = sensitivities
        self._run = run
        self._on_batch = on_batch
        self._inputs = CalibrationInputs.of_text(inputs) if isinstance(inputs, Tensor) else inputs
        self._activations: Activations | None = None
        self._position = 0
        # Number of values that blocks of the encoder of an encoder-decoder return in addition to hidden states.
        self._encoder_extra_count: int | None = None

    def advance_to(self, index: int) -> None:
        """Advance the hidden states to the input of block `index`."""
        self._enter_list()
        while self._position < index:
            with loaded_block(self._run, self._position) as block:
                for batch in range(len(self._states.hidden)):
                    self._step(block, self._position, batch)
            self._position += 1
            self._enter_list()

    def statistics(
        self, index: int, layers: tuple[str, ...], *, input_grams: bool
    ) -> tuple[dict[str, GramStatistics], dict[str, str]]:
        """Collect the Gram matrices of a block's layers while the hidden states pass through it.

        Args:
            index: the block; not before the current position of the walk.
            layers: names of the layers whose statistics are collected.
            input_grams: whether to collect the Gram matrices of the inputs even where those of the outputs are smaller.

        Returns:
            Statistics by layer, and for each layer the first one that reads the same input. A layer that the model
            never calls is in neither.
        """
        self.advance_to(index)
        prefix = f"{self._run.architecture.block_name(index)}."
        states = self._states
        with loaded_block(self._run, index) as block:
            modules = {name: block.get_submodule(name.removeprefix(prefix)) for name in layers}
            shapes = {name: self._run.architecture.shape(name) for name in layers}
            # An expert to which nothing is routed in this batch may get tokens in others.
            with visiting(block, "each"):
                groups = find_input_groups(modules, shapes, lambda: states.run(block, index, 0))
            if input_grams:
                groups = tuple(InputGroup(layers=group.layers, from_output=False) for group in groups)
            statistics = self._collect(block, index, modules, groups)
        self._position = index + 1
        return statistics, _group_names(groups)

    def pass_through(self, index: int, watching: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
        """Advance the hidden states past a block.

        Args:
            index: the block; not before the current position of the walk.
            watching: given the block with its weights loaded, returns a context that is active while it runs.
        """
        self.advance_to(index)
        with loaded_block(self._run, index) as block, watching(block):
            for batch in range(len(self._states.hidden)):
                self._step(block, index, batch)
        self._position = index + 1

    def _collect(
        self, block: nn.Module, index: int, modules: Mapping[str, nn.Module], groups: Sequence[InputGroup]
    ) -> dict[str, GramStatistics]:
        experts = find_experts(block, f"{self._run.architecture.block_name(index)}.")
        batches = len(self._states.hidden)
        measured = differentiated_tokens(self._run, self._inputs, self._states)
        weights = TokenWeights(self._sensitivities, self._states.hidden, measured, power=PROFILE_POWER)
        inputs = ExpertInputs(experts=experts, batches=batches, dtype=self._run.precision)
        everywhere = self._run.config.calibrate_all_experts
        with visiting(block, "all" if everywhere else "routed"), inputs.watching():
            statistics = collect_statistics(
                modules,
                groups,
                lambda batch: self._step(block, index, batch),
                batches=batches,
                dtype=self._run.precision,
                weights=weights.of,
            )
        return statistics if everywhere else inputs.shrunk(statistics, groups)

    def head_statistics(self, head: str) -> GramStatistics | None:
        """Collect the Gram matrix of the input of the output head; None if the model never calls it.

        The head itself is neither loaded nor run.
        """
        with self.head_inputs(head) as rows:
            first = next(rows, None)
            return None if first is None else sum_inputs(head, itertools.chain([first], rows), self._run.precision)

    @contextmanager
    def head_inputs(self, head: str) -> Iterator[Iterator[Tensor]]:
        """Yield what the output head reads, by batch; nothing if the model never calls it."""
        run = self._run
        blocks = run.architecture.lists[-1]
        self.advance_to(blocks.stop)

        def inputs(model: PreTrainedModel) -> Iterator[Tensor]:
            for number, batch in enumerate(split_inputs(run, self._inputs)):
                self._on_batch()
                modules = run.architecture.blocks_of(blocks), model.get_submodule(head)
                with self._without_encoder():
                    found = run_after(model, modules[0], batch, self._states, number, modules[1])
                if found is None:
                    return
                yield found

        with loaded_surroundings(run, blocks, head=False) as model:
            yield inputs(model)

    @contextmanager
    def _without_encoder(self) -> Iterator[None]:
        """Replace the encoder's blocks while the context is active; those of the decoder must be replaced as well."""
        lists = self._run.architecture.language_lists[:-1]
        nothing = (None,) * (self._encoder_extra_count or 0)
        with ExitStack() as stack:
            for blocks in lists:
                modules = self._run.architecture.blocks_of(blocks)
                stack.enter_context(placeholders(modules, lambda _index, hidden, _call: hidden, lambda: nothing))
            yield

    def block(self, index: int) -> AbstractContextManager[nn.Module]:
        """Return a context manager that yields a block with its weights loaded."""
        return loaded_block(self._run, index)

    def _step(self, block: nn.Module, index: int, batch: int) -> None:
        self._on_batch()
        self._states.step(block, index, batch)

    @property
    def _states(self) -> Activations:
        assert self._activations is not None
        return self._activations

    def _enter_list(self) -> None:
        """Record the calls of the list that the walk has reached, unless it has done so already, or is at the end."""
        if self._activations is not None and self._position == self._run.architecture.lists[-1].stop:
            return
        blocks = self._run.architecture.list_of(self._position)
        if self._activations is not None and self._activations.first == blocks.first:
            return
        passed = None
        if self._activations is not None:
            before = self._run.architecture.list_of(self._activations.first)
            passed = None if before.in_tower else (before, self._activations)
        if passed is not None:
            self._encoder_extra_count = passed[1].extra_count
        # Freed before the decoder's hidden states exist: nothing reads those of a tower any more.
        self._activations = None
        batches = split_inputs(self._run, self._inputs)
        self._activations = begin_walk(self._run, batches, blocks, passed=passed, held_in=self._run.held_dtype)


def differentiated_tokens(run: Run, inputs: CalibrationInputs, states: Activations) -> int:
    """Return how many of the last tokens the backward pass covers; 0 if all of them.

    Args:
        run: the run.
        inputs: all samples.
        states: their hidden states.
    """
    windows = run.config.gradient_windows(len(inputs))
    return 0 if windows == len(inputs) else inputs[-windows:].positions(states.hidden[0].shape[1])


@contextmanager
def loaded_block(run: Run, index: int) -> Iterator[nn.Module]:
    """Yield a block with its weights loaded while the context is active."""
    name = run.architecture.block_name(index)
    block = run.architecture.model.get_submodule(name)
    run.loader.load([name])
    if index + 1 < run.architecture.lists[-1].stop:
        run.loader.will_load(run.architecture.block_name(index + 1))
    try:
        yield block
    finally:
        run.loader.unload(block)
        return_grown_memory()


@contextmanager
def loaded_surroundings(run: Run, blocks: BlockList, *, head: bool) -> Iterator[PreTrainedModel]:
    """Yield the model with all weights except those of its blocks loaded while the context is active.

    Args:
        run: the run.
        blocks: the list to be walked, whose blocks are not run. Before the blocks of a decoder, the tower is.
        head: whether to load the output embeddings too; recording stops before they are called.
    """
    model = run.architecture.model
    output = model.get_output_embeddings()
    lists = [found.name for found in run.architecture.lists if found == blocks or not found.in_tower]
    left_out = (*lists, *run.idle)
    names = [name for name in _modules_outside(run, lists) if head or model.get_submodule(name) is not output]
    run.loader.load(names, without=left_out)
    _move_buffers(model, run.device)
    try:
        yield model
    finally:
        for name in names:
            run.loader.unload(model.get_submodule(name))
        return_freed_memory()


def split_inputs(
    run: Run, inputs: CalibrationInputs, positions_per_batch: int | None = None, *, least_batches: int = 1
) -> Iterator[dict[str, Tensor]]:
    """Return calibration inputs on the device, in batches of limited positions; a sample is never split.

    Args:
        run: the run.
        inputs: the samples.
        positions_per_batch: limit; None for what suits the device.
        least_batches: number of batches to make, if there are as many samples.
    """
    if positions_per_batch is None:
        positions_per_batch = tokens_per_batch(run.device.type)
    size = max(1, min(positions_per_batch // run.positions, len(inputs) // least_batches))
    return inputs.batches(size, run.device, run.compute_dtype)


def begin_walk(
    run: Run,
    batches: Iterable[Mapping[str, Tensor] | Tensor],
    blocks: BlockList,
    *,
    passed: tuple[BlockList, Activations] | None = None,
    on_loaded: Callable[[PreTrainedModel], None] = lambda _model: None,
    held_in: torch.dtype | None = None,
) -> Activations:
    """Take calibration inputs to the first block of a list, and record how the model would call each of its blocks.

    Args:
        run: the run.
        batches: arguments of the model by name, or windows of text.
        blocks: the list.
        passed: the encoder of an encoder-decoder, once its blocks have been walked; None for the first list.
        on_loaded: called with the model before it is run, with the weights of everything before the blocks.
        held_in: dtype to which hidden states are rounded between blocks; None for that in which they are computed.
    """
    architecture = run.architecture
    hidden = [] if held_in is None else HeldStates(held_in)
    before = (architecture.blocks_of(passed[0]), passed[1]) if passed else None
    with loaded_surroundings(run, blocks, head=False) as model, ExitStack() as stack:
        on_loaded(model)
        return record_block_inputs(
            model,
            architecture.blocks_of(blocks),
            batches,
            passed=before,
            states=Activations(hidden=hidden, calls=[], first=blocks.first),
            load_first=lambda: stack.enter_context(loaded_block(run, blocks.first)),
        )


def _modules_outside(run: Run, lists: Sequence[str]) -> list[str]:
    """Return the modules that own parameters and are in no block of the lists, without what the inputs do not reach."""
    model = run.architecture.model
    blocks = tuple(f"{name}." for name in lists)
    idle = tuple(f"{name}." for name in run.idle)
    owners = [name for name, module in model.named_modules() if any(map(_is_parameter, module._parameters.values()))]
    # Some models move their inputs to the device of their first parameter.
    return [
        name
        for name in owners
        if not f"{name}.".startswith(blocks) and (name == owners[0] or not f"{name}.".startswith(idle))
    ]


def _is_parameter(value: nn.Parameter | None) -> bool:
    return value is not None


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _group_names(groups: tuple[InputGroup, ...]) -> dict[str, str]:
    return {name: group.layers[0] for group in groups for name in group.layers}
