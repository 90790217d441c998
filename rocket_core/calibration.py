"""Streaming Gram matrices, one block at a time (paper, section 3).

A block is run on the inputs that the dense model gives it; hooks add up the Gram matrices of what its linear layers
read. Layers that read the same tensor share one matrix.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from rocket_core.architectures import oriented_weight
from rocket_core.errors import NonFiniteCalibrationError
from rocket_core.whitening import GramStatistics


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCall:
    """How the model calls a block, apart from the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Activations:
    """The hidden states that the next block reads, batch by batch, and how each block is called.

    Attributes:
        hidden: one tensor (windows, tokens, hidden size) per batch, replaced in place as blocks are passed.
        calls: for each batch the call of each block.
    """

    hidden: list[Tensor]
    calls: list[list[BlockCall]]

    def run(self, block: nn.Module, index: int, batch: int) -> Tensor:
        """Output of block `index` for one batch."""
        call = self.calls[batch][index]
        with torch.no_grad():
            output = block(self.hidden[batch], *call.args, **call.kwargs)
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    def step(self, block: nn.Module, index: int, batch: int) -> None:
        """Replaces the input of block `index` by its output, for one batch."""
        self.hidden[batch] = self.run(block, index, batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputGroup:
    """Layers of a block that read the same tensor.

    Attributes:
        members: layer names, in the order in which they are called; the first one names the group.
        from_output: whether the members' output Gram matrices are collected instead of the input's.
    """

    members: tuple[str, ...]
    from_output: bool


@dataclass(kw_only=True, slots=True)
class _Sums:
    """Running sums of one layer, in float64."""

    tokens: int = 0
    gram: Tensor | None = None
    energy: Tensor | None = None
    output_gram: Tensor | None = None


class _LastBlockReachedError(Exception):
    """Ends a forward pass whose remainder is of no interest."""


class _PassThrough(Tensor):
    """Hidden states that stand for the output of any block: itself, or the first entry of a tuple."""

    # What is computed from it is an ordinary tensor again, whose first row is no longer all of it.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Any:
        return self if isinstance(index, int) and index == 0 else super().__getitem__(index)


class StandIn(nn.Module):
    """Takes the place of a block that is not run.

    Args:
        block: the block; asked for whatever the stand-in lacks.
        receive: given the hidden states and the rest of the block's call; returns the hidden states to hand on.
    """

    def __init__(self, block: nn.Module, receive: Callable[[Tensor, BlockCall], Tensor]) -> None:
        super().__init__()
        # Not registered as a submodule: models ask blocks for attributes such as their attention type.
        self.__dict__.update(block=block, receive=receive)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Hands on what `receive` returns."""
        if args:
            hidden, args = args[0], args[1:]
        else:
            hidden = kwargs.pop("hidden_states")
        passed: Tensor = self.receive(hidden, BlockCall(args=args, kwargs=kwargs)).as_subclass(_PassThrough)
        return passed


@contextmanager
def stand_ins(blocks: nn.ModuleList, receive: Callable[[int, Tensor, BlockCall], Tensor]) -> Iterator[None]:
    """Replaces the blocks of a model for as long as the context lasts, so that the rest of it can be run alone.

    Args:
        blocks: the repeated blocks of a model.
        receive: given a block's index, its hidden states and its call; returns the hidden states to hand on.
    """
    originals = list(blocks)
    try:
        for index, block in enumerate(originals):
            blocks[index] = StandIn(block, functools.partial(receive, index))
        yield
    finally:
        for index, block in enumerate(originals):
            blocks[index] = block


def record_block_inputs(
    model: PreTrainedModel, blocks: nn.ModuleList, batches: Sequence[Int[Tensor, "_ tokens"]]
) -> Activations:
    """Runs what comes before the blocks and records how the model would call each block.

    Args:
        model: a model whose modules outside the blocks have their weights; the blocks' own are not used.
        blocks: the repeated blocks of `model`.
        batches: token ids, on the model's device.

    Returns:
        The inputs of the first block, and the calls of all.
    """
    activations = Activations(hidden=[], calls=[])
    for batch in batches:
        calls: list[BlockCall] = []
        hidden: list[Tensor] = []
        record = functools.partial(_record, calls, hidden, len(blocks))
        with stand_ins(blocks, record), torch.no_grad(), contextlib.suppress(_LastBlockReachedError):
            model(input_ids=batch, use_cache=False)
        activations.hidden.append(hidden[0])
        previous = activations.calls[-1] if activations.calls else calls
        activations.calls.append([_reuse(call, before) for call, before in zip(calls, previous, strict=True)])
    return activations


def _record(
    calls: list[BlockCall], hidden: list[Tensor], blocks: int, index: int, states: Tensor, call: BlockCall
) -> Tensor:
    hidden.append(states)
    calls.append(call)
    if index == blocks - 1:
        raise _LastBlockReachedError
    return states


def find_input_groups(
    layers: Mapping[str, nn.Module], shapes: Mapping[str, tuple[int, int]], run: Callable[[], object]
) -> tuple[InputGroup, ...]:
    """Finds which layers are called, and which of them read the same tensor, by running them once.

    A group collects the Gram matrix of its input, or those of its members' outputs where these are smaller together.

    Args:
        layers: name and module of the candidates.
        shapes: `(d_in, d_out)` of each.
        run: runs the block on one batch.

    Returns:
        The groups in calling order. A layer that is never called through `forward` is in none.
    """
    keys: dict[str, set[tuple[Any, ...]]] = {}
    # Inputs are kept until the run ends; a freed one could lend its address to another and join two groups.
    inputs: list[Tensor] = []

    def note(name: str, tensor: Tensor) -> None:
        inputs.append(tensor)
        key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        keys.setdefault(name, set()).add((*key, tensor._version))

    handles = [
        module.register_forward_pre_hook(
            lambda _module, args, kwargs, name=name: note(name, first_input(args, kwargs)), with_kwargs=True
        )
        for name, module in layers.items()
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    groups: dict[object, list[str]] = {}
    for name, seen in keys.items():
        # A layer that is called with several inputs shares none of them.
        groups.setdefault(next(iter(seen)) if len(seen) == 1 else name, []).append(name)
    return tuple(_input_group(tuple(members), shapes) for members in groups.values())


def collect_statistics(
    layers: Mapping[str, nn.Module],
    groups: Sequence[InputGroup],
    run: Callable[[int], object],
    *,
    batches: int,
    dtype: torch.dtype,
) -> dict[str, GramStatistics]:
    """Runs a block on all batches and adds up the Gram matrices of its layers.

    Products are taken in `dtype` and summed in float64.

    Args:
        layers: name and module of the block's compressible layers.
        groups: which of them share an input.
        run: runs the block on the batch of that number.
        batches: how many batches there are.
        dtype: dtype of the products, float32 or float64.

    Returns:
        Statistics by layer name; members of a group share tensors.

    Raises:
        NonFiniteCalibrationError: NaN or infinity in a layer's input or output; the message names layer and batch.
    """
    collector = _Collector(dtype=dtype)
    handles = [
        layers[name].register_forward_hook(collector.hook(name, group), with_kwargs=True)
        for group in groups
        for name in (group.members if group.from_output else group.members[:1])
    ]
    try:
        for batch in range(batches):
            collector.batch = batch
            run(batch)
    finally:
        for handle in handles:
            handle.remove()
    return {name: collector.statistics(name, group) for group in groups for name in group.members}


@dataclass(kw_only=True, slots=True)
class _Collector:
    dtype: torch.dtype
    batch: int = 0
    sums: dict[str, _Sums] = field(default_factory=dict)

    def hook(self, name: str, group: InputGroup) -> Callable[[nn.Module, Any, Any, Tensor], None]:
        """A forward hook that adds what this layer contributes to its group."""

        def add(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            sums = self.sums.setdefault(name, _Sums())
            if name == group.members[0]:
                rows = self._rows(first_input(args, kwargs))
                sums.tokens += rows.shape[0]
                if group.from_output:
                    sums.energy = self._added(sums.energy, rows.square().sum(0), name)
                else:
                    sums.gram = self._added(sums.gram, rows.mT @ rows, name)
                    sums.energy = sums.gram.diagonal()
            if group.from_output:
                # Taking a large bias off a rounded output would leave noise; a second product costs little.
                biased = isinstance(module.bias, Tensor)
                weight = oriented_weight(module).to(self.dtype) if biased else None
                rows = self._rows(output) if weight is None else self._rows(first_input(args, kwargs)) @ weight
                sums.output_gram = self._added(sums.output_gram, rows.mT @ rows, name)

        return add

    def statistics(self, name: str, group: InputGroup) -> GramStatistics:
        """The finished sums of a layer."""
        leader = self.sums[group.members[0]]
        assert leader.energy is not None
        return GramStatistics(
            tokens=leader.tokens,
            gram=leader.gram,
            output_gram=self.sums[name].output_gram if group.from_output else None,
            input_energy=leader.energy,
        )

    def _rows(self, tensor: Tensor) -> Float[Tensor, "rows features"]:
        return tensor.detach().reshape(-1, tensor.shape[-1]).to(self.dtype)

    def _added(self, total: Tensor | None, term: Tensor, name: str) -> Tensor:
        # A NaN or infinity anywhere in the rows shows on the diagonal of their Gram matrix.
        diagonal = term if term.ndim == 1 else term.diagonal()
        if not bool(torch.isfinite(diagonal).all()):
            raise NonFiniteCalibrationError(
                f"activations of layer {name} are NaN or infinite in calibration batch {self.batch}; run the model in "
                "a wider dtype (dtype float32), or check its weights and the calibration text"
            )
        return term.double() if total is None else total.add_(term)


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a linear layer is called with, by position or by name."""
    tensor: Tensor = args[0] if args else next(iter(kwargs.values()))
    return tensor


def _input_group(members: tuple[str, ...], shapes: Mapping[str, tuple[int, int]]) -> InputGroup:
    d_in = shapes[members[0]][0]
    outputs = [shapes[name][1] for name in members]
    # Only a basis no wider than the input can come from the output's Gram matrix.
    from_output = max(outputs) <= d_in and sum(d_out**2 for d_out in outputs) < d_in**2
    return InputGroup(members=members, from_output=from_output)


def _reuse(new: Any, old: Any) -> Any:
    """`old` wherever it equals `new`, so that what all batches have in common is held in memory once."""
    if isinstance(new, BlockCall):
        return BlockCall(args=_reuse(new.args, old.args), kwargs=_reuse(new.kwargs, old.kwargs))
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        same = new is old or (new.shape == old.shape and new.dtype == old.dtype and torch.equal(new, old))
        return old if same else new
    if isinstance(new, tuple) and isinstance(old, tuple) and len(new) == len(old):
        return tuple(_reuse(*pair) for pair in zip(new, old, strict=True))
    if isinstance(new, dict) and isinstance(old, dict) and new.keys() == old.keys():
        return {key: _reuse(value, old[key]) for key, value in new.items()}
    return new
