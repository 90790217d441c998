"""Cache for outputs of parts of a block that do not change between passes over a batch."""

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from rocket_core.models.called_lists import is_called
from rocket_core.models.recorded_call import replace_tensors


class FinishedParts:
    """The cached outputs of a block's attention and other parts that finish before the layer that a pass should reach.

    A block is run repeatedly, each time up to a later layer, and nothing before that layer changes any more. A part
    that has finished when the layer is reached returns the same in every later pass, so its output is cached.

    Args:
        block: the block.
        layers: names of its layers within the block; parts without any are cheaper to run than to cache.
    """

    def __init__(self, block: nn.Module, layers: Collection[str]) -> None:
        self._parts = [
            part for name, part in called_parts(block) if any(layer.startswith(f"{name}.") for layer in layers)
        ]
        self._cached: dict[tuple[int, int], Any] = {}
        self._new: dict[tuple[int, int], Any] = {}
        self._room: dict[int, int] = {}
        self._open = False

    @contextmanager
    def passing(self, batch: int, hidden: Tensor) -> Iterator[None]:
        """Reuse outputs while a batch passes through the block, and store those of parts before `reached` is called.

        Nothing is stored if it is not called: an expert to which no token is routed is not reached, and no part after
        it has finished.

        Args:
            batch: index of the batch.
            hidden: the block's input; its size is the upper bound on what is cached for the batch.
        """
        self._open = True
        self._new.clear()
        self._room.setdefault(batch, hidden.numel())
        called: set[int] = set()
        with ExitStack() as stack:
            for number, part in enumerate(self._parts):
                forward = functools.partial(self._forward, number, batch, called, part.forward)
                stack.enter_context(_replaced_forward(part, forward))
            yield

    def clear(self) -> None:
        """Remove all outputs: weights have changed."""
        self._cached.clear()
        self._room.clear()

    def reached(self) -> None:
        """Store outputs, but none of later parts: the pass has reached the layer after which weights may change."""
        for (number, batch), output in self._new.items():
            self._cached[number, batch] = output
            self._room[batch] -= _size(output) or 0
        self._new.clear()
        self._open = False

    def _forward(
        self, number: int, batch: int, called: set[int], run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        # A part may be called more than once; only the first call is known to have the same arguments in each pass.
        first = number not in called
        called.add(number)
        if first and (number, batch) in self._cached:
            # A copy, as blocks may modify it in place.
            return replace_tensors(self._cached[number, batch], Tensor.clone)
        output = run(*args, **kwargs)
        size = _size(output)
        if first and self._open and size is not None and size + self._waiting() <= self._room[batch]:
            self._new[number, batch] = replace_tensors(output, Tensor.clone)
        return output

    def _waiting(self) -> int:
        return sum(_size(output) or 0 for output in self._new.values())


@contextmanager
def _replaced_forward(part: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = vars(part)
    before = own.get("forward")
    own["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before


def called_parts(block: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a block calls directly; module lists that are not called are descended into."""
    for name, part in block.named_children():
        if isinstance(part, nn.ModuleList | nn.ModuleDict) and not is_called(part):
            yield from called_parts(part, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", part


def _size(output: Any) -> int | None:
    """Return the number of elements in an output; None if it contains anything but tensors."""
    size = 0
    for entry in output if isinstance(output, tuple) else (output,):
        if isinstance(entry, Tensor):
            size += entry.numel()
        elif entry is not None:
            return None
    return size
