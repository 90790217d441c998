"""Recorded calls of a model's repeated blocks, so that blocks can be run one at a time.

Everything outside the blocks is the model's own code, run with placeholders in place of the blocks.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rocket_core.errors import UnsupportedArchitectureError
from rocket_core.models.recorded_call import BlockCall, replace_tensors, reuse_equal, without_caches


@dataclass(kw_only=True, slots=True)
class Activations:
    """The input hidden states of the next block, per batch, and the calls of all blocks.

    Attributes:
        hidden: one tensor (windows, tokens, hidden size) per batch, replaced in place as blocks are run.
        calls: for each batch the call of each block in the list.
        added: for each batch what the model adds to the output of each block before it calls the next, as Qwen3-VL does
            with features of images; None for nothing.
        first: index of the first block of the list, counted through all lists of the model.
        extra_count: number of values that blocks return in addition to the hidden states; None if they return no tuple.
    """

    hidden: MutableSequence[Tensor]
    calls: list[list[BlockCall]]
    added: list[list[Tensor | None]] = field(default_factory=list)
    first: int = 0
    extra_count: int | None = None

    def run(self, block: nn.Module, index: int, batch: int) -> Tensor:
        """Return the output of block `index` for one batch, as the next block reads it."""
        call = self.calls[batch][index - self.first]
        with torch.no_grad():
            output = block(self.hidden[batch], *call.args, **call.kwargs)
        return self.output_of(output, index, batch)

    def output_of(self, returned: Any, index: int, batch: int) -> Tensor:
        """Return what the next block reads, given what block `index` returned for one batch."""
        if isinstance(returned, tuple | list):
            self.extra_count = len(returned) - 1
            returned = returned[0]
        added = self.added[batch][index - self.first] if self.added else None
        hidden: Tensor = returned if added is None else returned + added
        return hidden

    def absent_extras(self) -> tuple[None, ...]:
        """Return None in place of each value that blocks return in addition to the hidden states."""
        return (None,) * (self.extra_count or 0)

    def step(self, block: nn.Module, index: int, batch: int) -> None:
        """Replace the input of block `index` with its output, for one batch."""
        self.hidden[batch] = self.run(block, index, batch)


class _EnoughError(Exception):
    """Raised to end a forward pass early."""


class _PassThrough(Tensor):
    """Hidden states that represent a block's return value: a tensor, or a tuple whose first item is the tensor."""

    # Results of operations are ordinary tensors again, for which index 0 is the first row.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    extra_outputs: Callable[[], tuple[Any, ...]]

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int):
            return super().__getitem__(index)
        return self if index == 0 else tuple(self)[index]

    def __iter__(self) -> Iterator[Any]:
        return iter((self, *self.extra_outputs()))


def _nothing() -> tuple[Any, ...]:
    return ()


class Placeholder(nn.Module):
    """A placeholder for a block that is not run.

    Args:
        block: the block; provides attributes that the placeholder lacks.
        receive: given the hidden states and the rest of the block's call; returns the hidden states to return.
        extra_outputs: returns the block's other return values; called when the model unpacks them.
    """

    def __init__(
        self,
        block: nn.Module,
        receive: Callable[[Tensor, BlockCall], Tensor],
        extra_outputs: Callable[[], tuple[Any, ...]] = _nothing,
    ) -> None:
        super().__init__()
        # Not registered as a submodule; models read attributes of blocks, such as their attention type.
        self.__dict__.update(block=block, receive=receive, extra_outputs=extra_outputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the result of `receive`."""
        if args:
            hidden, args = args[0], args[1:]
        else:
            # Under whatever name: that of the first parameter.
            name = (
                "hidden_states" if "hidden_states" in kwargs else next(iter(signature(self.block.forward).parameters))
            )
            hidden = kwargs.pop(name)
        passed: _PassThrough = self.receive(hidden, BlockCall(args=args, kwargs=kwargs)).as_subclass(_PassThrough)
        passed.extra_outputs = self.extra_outputs
        return passed


@contextmanager
def placeholders(
    blocks: nn.ModuleList,
    receive: Callable[[int, Tensor, BlockCall], Tensor],
    extra_outputs: Callable[[], tuple[Any, ...]] = _nothing,
) -> Iterator[None]:
    """Replace the blocks of a model while the context is active, so that the rest of the model can be run alone.

    Args:
        blocks: the repeated blocks of a model.
        receive: given a block's index, its hidden states and its call; returns the hidden states to return.
        extra_outputs: returns a block's other return values; called when the model unpacks them.
    """
    originals = list(blocks)
    try:
        for index, block in enumerate(originals):
            blocks[index] = Placeholder(block, functools.partial(receive, index), extra_outputs)
        yield
    finally:
        for index, block in enumerate(originals):
            blocks[index] = block


def record_block_inputs(
    model: PreTrainedModel,
    blocks: nn.ModuleList,
    batches: Iterable[Tensor | Mapping[str, Tensor]],
    *,
    passed: tuple[nn.ModuleList, Activations] | None = None,
    states: Activations | None = None,
    load_first: Callable[[], object] = _nothing,
) -> Activations:
    """Run the model up to a list of blocks, and record how it would call each of them.

    Args:
        model: a model whose modules outside the blocks have their weights; those of the blocks are not used, except for
            the first block's if the model passes its additional return values to later blocks (T5's position bias).
        blocks: the repeated blocks; in an encoder-decoder, those of one of the two.
        batches: arguments of the model by name, on its device; a tensor is passed as `input_ids`.
        passed: in an encoder-decoder the encoder's blocks, and their activations with the last one's output. If that
            requires gradients, tensors in the calls that depend on it are part of its autograd graph.
        states: filled and returned, if given; without hidden states and calls, but with the index of the first block.
        load_first: called once if the first block needs its weights, to load them.

    Returns:
        The inputs of the first block, and the calls of all blocks.

    Raises:
        UnsupportedArchitectureError: the model does not run its blocks in order, each exactly once.
    """
    activations = Activations(hidden=[], calls=[]) if states is None else states
    loaded = False
    for number, arguments in enumerate(batches):
        batch = {"input_ids": arguments} if isinstance(arguments, Tensor) else arguments
        with handing_on(passed, number):
            recording = _record(model, blocks, batch, None)
        if len(recording.calls) < len(blocks):
            if not loaded:
                load_first()
                loaded = True
            extras = recording.run_first(blocks[0])
            with handing_on(passed, number):
                recording = _record(model, blocks, batch, extras)
        activations.hidden.append(recording.hidden[0])
        with handing_on(passed, number):
            activations.added.append(_find_added(model, blocks, batch, recording))
        calls = recording.calls
        previous = activations.calls[-1] if activations.calls else calls
        activations.calls.append([reuse_equal(call, before) for call, before in zip(calls, previous, strict=True)])
    return activations


@dataclass(kw_only=True, slots=True)
class _Recording:
    """The calls of a list of blocks, recorded in one forward pass.

    Attributes:
        blocks: number of blocks.
        extras: the first block's return values after the hidden states, which are passed to all later blocks; None if
            unknown, in which case a pass that needs them ends.
        returned: number that all blocks return in place of their hidden states; None for their input.
        hidden: input of each block that was called.
        calls: the rest of each call.
    """

    blocks: int
    extras: tuple[Any, ...] | None
    returned: float | None = None
    hidden: list[Tensor] = field(default_factory=list)
    calls: list[BlockCall] = field(default_factory=list)

    def receive(self, index: int, hidden: Tensor, call: BlockCall) -> Tensor:
        """Record a block's call in its place."""
        if index != len(self.calls):
            raise UnsupportedArchitectureError(
                f"the model runs block {index} where block {len(self.calls)} should follow; only models that run each "
                "block once, one after the other, can be compressed"
            )
        self.hidden.append(hidden)
        self.calls.append(without_caches(BlockCall(args=_plain(call.args), kwargs=_plain(call.kwargs))))
        if index == self.blocks - 1:
            raise _EnoughError
        return hidden if self.returned is None else torch.full_like(hidden, self.returned)

    @property
    def is_chained(self) -> bool:
        """Whether each block gets what the one before it returned; results of operations have another type."""
        return all(type(hidden) is _PassThrough for hidden in self.hidden[1:])

    def extra_outputs(self) -> tuple[Any, ...]:
        """Return a block's return values after the hidden states."""
        if self.extras is None:
            raise _EnoughError
        return self.extras

    def run_first(self, block: nn.Module) -> tuple[Any, ...]:
        """Run the first block, and return its values after the hidden states."""
        with torch.no_grad():
            output = block(self.hidden[0], *self.calls[0].args, **self.calls[0].kwargs)
        return tuple(output[1:])


def _record(
    model: PreTrainedModel,
    blocks: nn.ModuleList,
    batch: Mapping[str, Tensor],
    extras: tuple[Any, ...] | None,
    *,
    returned: float | None = None,
) -> _Recording:
    recording = _Recording(blocks=len(blocks), extras=extras, returned=returned)
    with placeholders(blocks, recording.receive, recording.extra_outputs), contextlib.suppress(_EnoughError):
        model(**batch, **without_cache(model))
        raise UnsupportedArchitectureError(
            f"{type(model).__name__} runs {len(recording.calls)} of its {len(blocks)} blocks; only models that run all "
            "of them can be compressed"
        )
    return recording


def _find_added(
    model: PreTrainedModel, blocks: nn.ModuleList, batch: Mapping[str, Tensor], recording: _Recording
) -> list[Tensor | None]:
    """Return what the model adds to the output of each block: what the next one reads if all blocks return zeros."""
    if recording.is_chained:
        return [None] * len(blocks)
    zeros, ones = (_record(model, blocks, batch, recording.extras, returned=value).hidden[1:] for value in (0.0, 1.0))
    for index, (added, more) in enumerate(zip(zeros, ones, strict=True)):
        if added.shape != recording.hidden[index].shape or not torch.equal(added + 1, more):
            raise UnsupportedArchitectureError(
                f"{type(model).__name__} changes the hidden states between blocks {index} and {index + 1}; only models "
                "that pass them on, or add something to them, can be compressed"
            )
    return [*(_plain(added) if bool(added.any()) else None for added in zeros), None]


def run_before(model: PreTrainedModel, blocks: nn.ModuleList, batch: Mapping[str, Tensor]) -> Tensor:
    """Return what the first block of a model reads, and leave a graph for autograd if something requires gradients."""
    found: list[Tensor] = []

    def receive(_index: int, hidden: Tensor, _call: BlockCall) -> Tensor:
        found.append(hidden)
        raise _EnoughError

    with placeholders(blocks, receive), contextlib.suppress(_EnoughError):
        model(**batch, **without_cache(model))
    return found[0]


def added_by_model(model: PreTrainedModel, blocks: nn.ModuleList, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """Return what each block reads if all of them return zeros; graphs for autograd are kept.

    For the first block this is what precedes all, for each other what the model adds to the output of the one before.
    """
    recording = _Recording(blocks=len(blocks), extras=(), returned=0.0)
    with placeholders(blocks, recording.receive, recording.extra_outputs), contextlib.suppress(_EnoughError):
        model(**batch, **without_cache(model))
    return recording.hidden


def run_after(
    model: PreTrainedModel,
    blocks: nn.ModuleList,
    batch: Mapping[str, Tensor],
    activations: Activations,
    number: int,
    module: nn.Module,
) -> Tensor | None:
    """Return what a module reads that the model calls after its blocks; None if it never calls it.

    Args:
        model: with the weights of everything between the blocks and the module.
        blocks: its repeated blocks.
        batch: arguments of the model by name.
        activations: contain the output of the last block.
        number: index of the batch in the activations.
        module: the module, which is not run.
    """
    found: list[Tensor] = []

    def note(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        found.append(args[0] if args else next(iter(kwargs.values())))
        raise _EnoughError

    hidden = activations.hidden[number]
    with (
        module.register_forward_pre_hook(note, with_kwargs=True),
        torch.no_grad(),
        placeholders(blocks, lambda _index, _hidden, _call: hidden, activations.absent_extras),
        contextlib.suppress(_EnoughError),
    ):
        model(**batch, **without_cache(model))
    return found[0] if found else None


@contextmanager
def handing_on(
    passed: tuple[nn.ModuleList, Activations] | None, batch: int, samples: slice = slice(None)
) -> Iterator[None]:
    """Make blocks that have already been run return their last block's output while the context is active.

    Autograd records operations on that output only if it requires gradients.

    Args:
        passed: the blocks, and their activations with the last one's output; None only disables gradients.
        batch: index of the batch.
        samples: samples of that batch.
    """
    if passed is None:
        with torch.no_grad():
            yield
        return
    blocks, activations = passed
    hidden = activations.hidden[batch]
    with (
        placeholders(blocks, lambda _index, _hidden, _call: hidden[samples], activations.absent_extras),
        torch.set_grad_enabled(hidden.requires_grad),
    ):
        yield


def without_cache(model: nn.Module) -> dict[str, bool]:
    """Return arguments that disable a model's cache; models without one pass unknown arguments to their blocks."""
    return {"use_cache": False} if "use_cache" in signature(model.forward).parameters else {}


def _plain(value: Any) -> Any:
    """Return a call's arguments with every `_PassThrough` converted to an ordinary tensor."""
    return replace_tensors(value, lambda tensor: tensor.as_subclass(Tensor) if type(tensor) is _PassThrough else tensor)
