"""How a model calls its repeated blocks: recorded once, so that blocks can be run one at a time.

All that is not in a block is the model's own code, run with stand-ins in the place of the blocks.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rocket_core.errors import UnsupportedArchitectureError


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
        calls: for each batch the call of each block of their list.
        first: index of the first block of the list, counted through all lists of the model.
        beside: how many things the blocks return beside the hidden states; None where they return no tuple.
    """

    hidden: list[Tensor]
    calls: list[list[BlockCall]]
    first: int = 0
    beside: int | None = None

    def run(self, block: nn.Module, index: int, batch: int) -> Tensor:
        """Output of block `index` for one batch."""
        call = self.calls[batch][index - self.first]
        with torch.no_grad():
            output = block(self.hidden[batch], *call.args, **call.kwargs)
        if isinstance(output, tuple):
            self.beside = len(output) - 1
            output = output[0]
        hidden: Tensor = output
        return hidden

    def step(self, block: nn.Module, index: int, batch: int) -> None:
        """Replace the input of block `index` by its output, for one batch."""
        self.hidden[batch] = self.run(block, index, batch)


class _EnoughError(Exception):
    """Ends a forward pass whose remainder is of no interest."""


class _PassThrough(Tensor):
    """Hidden states that stand for all that a block returns: a tensor, or a tuple that begins with it."""

    # What is computed from it is an ordinary tensor again, whose first row is no longer all of it.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    beside: Callable[[], tuple[Any, ...]]

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int):
            return super().__getitem__(index)
        return self if index == 0 else tuple(self)[index]

    def __iter__(self) -> Iterator[Any]:
        return iter((self, *self.beside()))


def _nothing() -> tuple[Any, ...]:
    return ()


class StandIn(nn.Module):
    """Takes the place of a block that is not run.

    Args:
        block: the block; asked for whatever the stand-in lacks.
        receive: given the hidden states and the rest of the block's call; returns the hidden states to hand on.
        beside: gives what the block returns beside them; asked where the model takes that apart.
    """

    def __init__(
        self,
        block: nn.Module,
        receive: Callable[[Tensor, BlockCall], Tensor],
        beside: Callable[[], tuple[Any, ...]] = _nothing,
    ) -> None:
        super().__init__()
        # Not registered as a submodule: models ask blocks for attributes such as their attention type.
        self.__dict__.update(block=block, receive=receive, beside=beside)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Hands on what `receive` returns."""
        if args:
            hidden, args = args[0], args[1:]
        else:
            hidden = kwargs.pop("hidden_states")
        passed: _PassThrough = self.receive(hidden, BlockCall(args=args, kwargs=kwargs)).as_subclass(_PassThrough)
        passed.beside = self.beside
        return passed


@contextmanager
def stand_ins(
    blocks: nn.ModuleList,
    receive: Callable[[int, Tensor, BlockCall], Tensor],
    beside: Callable[[], tuple[Any, ...]] = _nothing,
) -> Iterator[None]:
    """Replace the blocks of a model for as long as the context lasts, so that the rest of it can be run alone.

    Args:
        blocks: the repeated blocks of a model.
        receive: given a block's index, its hidden states and its call; returns the hidden states to hand on.
        beside: gives what a block returns beside them; asked where the model takes that apart.
    """
    originals = list(blocks)
    try:
        for index, block in enumerate(originals):
            blocks[index] = StandIn(block, functools.partial(receive, index), beside)
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
    load_first: Callable[[], object] = _nothing,
) -> Activations:
    """Run what comes before a list of blocks and records how the model would call each of them.

    Args:
        model: a model whose modules outside the blocks have their weights; the blocks' own are not used, but for those
            of the first one where the model hands on what that returns beside the hidden states (T5's position bias).
        blocks: the repeated blocks; in an encoder-decoder, those of one of the two.
        batches: arguments of the model by name, on its device; a tensor stands for `input_ids`.
        passed: in an encoder-decoder the encoder's blocks, and their activations with the last one's output. Where
            that requires gradients, what the calls hold of it has come by a recorded way, to be run backward.
        load_first: called once where the first block needs its weights, to load them.

    Returns:
        The inputs of the first block, and the calls of all.

    Raises:
        UnsupportedArchitectureError: the model does not run its blocks one after the other, each of them once.
    """
    activations = Activations(hidden=[], calls=[], first=passed[1].first + len(passed[0]) if passed else 0)
    loaded = False
    for number, given in enumerate(batches):
        batch = {"input_ids": given} if isinstance(given, Tensor) else given
        with handing_on(passed, number):
            recording = _record(model, blocks, batch, None)
        if len(recording.calls) < len(blocks):
            if not loaded:
                load_first()
                loaded = True
            beside = recording.run_first(blocks[0])
            with handing_on(passed, number):
                recording = _record(model, blocks, batch, beside)
        activations.hidden.append(recording.hidden[0])
        calls = recording.calls
        previous = activations.calls[-1] if activations.calls else calls
        activations.calls.append([_reuse(call, before) for call, before in zip(calls, previous, strict=True)])
    return activations


@dataclass(kw_only=True, slots=True)
class _Recording:
    """What one forward pass tells of a list of blocks.

    Attributes:
        blocks: how many there are.
        extras: what the first block returns beside the hidden states, which all that follow are handed; None if that is
            not known, and a pass that needs it ends.
        hidden: input of each block that was called.
        calls: the rest of its call.
    """

    blocks: int
    extras: tuple[Any, ...] | None
    hidden: list[Tensor] = field(default_factory=list)
    calls: list[BlockCall] = field(default_factory=list)

    def receive(self, index: int, hidden: Tensor, call: BlockCall) -> Tensor:
        """Take the place of a block."""
        if index != len(self.calls):
            raise UnsupportedArchitectureError(
                f"the model runs block {index} where block {len(self.calls)} should follow; only models that run each "
                "block once, one after the other, can be compressed"
            )
        self.hidden.append(hidden)
        self.calls.append(BlockCall(args=_plain(call.args), kwargs=_plain(call.kwargs)))
        if index == self.blocks - 1:
            raise _EnoughError
        return hidden

    def beside(self) -> tuple[Any, ...]:
        """Return what a block returns beside the hidden states."""
        if self.extras is None:
            raise _EnoughError
        return self.extras

    def run_first(self, block: nn.Module) -> tuple[Any, ...]:
        """Really runs the first block."""
        with torch.no_grad():
            output = block(self.hidden[0], *self.calls[0].args, **self.calls[0].kwargs)
        return tuple(output[1:])


def _record(
    model: PreTrainedModel, blocks: nn.ModuleList, batch: Mapping[str, Tensor], extras: tuple[Any, ...] | None
) -> _Recording:
    recording = _Recording(blocks=len(blocks), extras=extras)
    with stand_ins(blocks, recording.receive, recording.beside), contextlib.suppress(_EnoughError):
        model(**batch, **without_cache(model))
        raise UnsupportedArchitectureError(
            f"{type(model).__name__} runs {len(recording.calls)} of its {len(blocks)} blocks; only models that run all "
            "of them can be compressed"
        )
    return recording


@contextmanager
def handing_on(
    passed: tuple[nn.ModuleList, Activations] | None, batch: int, samples: slice = slice(None)
) -> Iterator[None]:
    """Has blocks that have been walked hand on what the last of them gave, for as long as the context lasts.

    Autograd records what the model makes of it only where it requires gradients.

    Args:
        passed: the blocks, and their activations with the last one's output; None changes nothing.
        batch: number of the batch.
        samples: of that batch.
    """
    if passed is None:
        with torch.no_grad():
            yield
        return
    blocks, activations = passed
    nothing = (None,) * (activations.beside or 0)
    hidden = activations.hidden[batch]
    with (
        stand_ins(blocks, lambda _index, _hidden, _call: hidden[samples], lambda: nothing),
        torch.set_grad_enabled(hidden.requires_grad),
    ):
        yield


def without_cache(model: nn.Module) -> dict[str, bool]:
    """How to call a model so that it keeps no cache; those that never do hand unknown arguments on to their blocks."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def replace_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a call, or a part of its arguments, with every tensor changed."""
    if isinstance(value, BlockCall):
        return BlockCall(args=replace_tensors(value.args, change), kwargs=replace_tensors(value.kwargs, change))
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(replace_tensors(item, change) for item in value)
    return {key: replace_tensors(item, change) for key, item in value.items()} if isinstance(value, dict) else value


def _plain(value: Any) -> Any:
    """Return a call's arguments with ordinary tensors in the place of those that stand for a block's output."""
    return replace_tensors(value, lambda tensor: tensor.as_subclass(Tensor) if type(tensor) is _PassThrough else tensor)


def _reuse(new: Any, old: Any) -> Any:
    """`old` wherever it equals `new`, so that what all batches have in common is held in memory once."""
    if isinstance(new, BlockCall):
        return BlockCall(args=_reuse(new.args, old.args), kwargs=_reuse(new.kwargs, old.kwargs))
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        if new.requires_grad:
            return new  # It leads back to its own batch.
        same = new is old or (new.shape == old.shape and new.dtype == old.dtype and torch.equal(new, old))
        return old if same else new
    if isinstance(new, tuple) and isinstance(old, tuple) and len(new) == len(old):
        return tuple(_reuse(*pair) for pair in zip(new, old, strict=True))
    if isinstance(new, dict) and isinstance(old, dict) and new.keys() == old.keys():
        return {key: _reuse(value, old[key]) for key, value in new.items()}
    return new
