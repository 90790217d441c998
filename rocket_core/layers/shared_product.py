"""One product with a dictionary for all layers that share it."""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True, slots=True)
class _Entry:
    input: weakref.ref[Tensor]
    dictionary: weakref.ref[Tensor]
    versions: tuple[int, int]
    autocast: torch.dtype | None
    product: Tensor
    uses: int


class SharedProduct:
    """The product of a dictionary with the input that a group of layers reads, from the group's first call to its last.

    It is the same input if it is the same tensor, not written to since. The input is not kept alive, nor is the product
    once all have used it, or another input came, or the input is gone. Copies of a model start without it.
    """

    def __init__(self) -> None:
        self._entry: _Entry | None = None

    @staticmethod
    def is_possible(input: Tensor, dictionary: Tensor) -> bool:  # noqa: A002 (as `nn.Linear` calls it)
        """Whether calls on this input may share.

        Not while autograd records: each call's graph is then its own to free, to recompute and to run backward through.
        Not in inference mode, nor while compiling, where nothing tells whether a tensor has been written to; of a graph
        with gradients the compiler merges equal products itself.
        """
        if torch.compiler.is_compiling() or input.is_inference() or dictionary.is_inference():
            return False
        return not (torch.is_grad_enabled() and (input.requires_grad or dictionary.requires_grad))

    def take(self, input: Tensor, dictionary: Tensor) -> Tensor | None:  # noqa: A002
        """Return the product, if a call on this input has left one.

        A dictionary that is offloaded again, on the meta device, counts as unchanged.
        """
        entry = self._entry
        if entry is None or entry.input() is not input or entry.autocast != _autocast_dtype(input):
            return None
        written, changed = entry.versions
        if input._version != written:
            return None
        if not dictionary.is_meta and (entry.dictionary() is not dictionary or dictionary._version != changed):
            return None
        entry.uses -= 1
        if entry.uses <= 0:
            self._entry = None
        return entry.product

    def leave(self, input: Tensor, dictionary: Tensor, product: Tensor, uses: int) -> None:  # noqa: A002
        """Leaves the product for so many further calls."""
        self._entry = _Entry(
            input=weakref.ref(input, self._forget),
            dictionary=weakref.ref(dictionary),
            versions=(input._version, dictionary._version),
            autocast=_autocast_dtype(input),
            product=product,
            uses=uses,
        )

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        if self._entry is not None and self._entry.input is gone:
            self._entry = None

    def __reduce__(self) -> tuple[type["SharedProduct"], tuple[()]]:
        return type(self), ()


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return what autocast makes of a product with the tensor; None where it is off."""
    device = tensor.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None
