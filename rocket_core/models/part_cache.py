"""Parts of a block that need not be run again: their outputs are kept from one pass over a batch to the next."""

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from rocket_core.models.block_calls import replace_tensors


class FinishedParts:
    """The outputs of a block's attention, and of what else comes before the layer that a pass is to reach.

    A block is run again and again, each time up to a layer further on, while nothing before that layer changes any
    more. A part that has been left when the layer is reached gives the same in every later pass, so that its output is
    kept and handed out instead.

    Args:
        block: the block.
        layers: names within the block of its layers; parts without any are cheaper to run than to keep.
    """

    def __init__(self, block: nn.Module, layers: Collection[str]) -> None:
        self._parts = [part for name, part in _parts(block) if any(layer.startswith(f"{name}.") for layer in layers)]
        self._kept: dict[tuple[int, int], Any] = {}
        self._room: dict[int, int] = {}
        self._open = False

    @contextmanager
    def passing(self, batch: int, hidden: Tensor) -> Iterator[None]:
        """Keep and hands out outputs while a batch passes through the block, up to `reached`.

        Args:
            batch: number of the batch.
            hidden: the block's input; what is kept of a batch takes no more than that.
        """
        self._open = True
        self._room.setdefault(batch, hidden.numel())
        called: set[int] = set()

        def forward(number: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # A part may be called more than once; what it is called with is known to be the same for the first call.
            first = number not in called
            called.add(number)
            if first and (number, batch) in self._kept:
                # Blocks may add to it in place.
                return replace_tensors(self._kept[number, batch], Tensor.clone)
            output = run(*args, **kwargs)
            size = _size(output)
            if first and self._open and size is not None and size <= self._room[batch]:
                self._kept[number, batch] = replace_tensors(output, Tensor.clone)
                self._room[batch] -= size
            return output

        with ExitStack() as stack:
            for number, part in enumerate(self._parts):
                stack.enter_context(_replaced_forward(part, functools.partial(forward, number, part.forward)))
            yield

    def reached(self) -> None:
        """Says that the pass has come to the layer behind which weights may still change."""
        self._open = False


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


def _parts(block: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Return the modules that a block calls itself; lists of modules are never called."""
    for name, part in block.named_children():
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            yield from _parts(part, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", part


def _size(output: Any) -> int | None:
    """Numbers in an output; None where it holds anything but tensors."""
    size = 0
    for entry in output if isinstance(output, tuple) else (output,):
        if isinstance(entry, Tensor):
            size += entry.numel()
        elif entry is not None:
            return None
    return size
