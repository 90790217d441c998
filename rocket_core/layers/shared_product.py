"""Cache for the product of a shared dictionary with its input."""

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
    """The product of a dictionary with the input of a group of layers, cached from the group's first call to its last.

    Inputs are equal if they are the same tensor, not modified since. The input is not kept alive; the product is
    released when all layers have used it, when another input arrives, or when the input is deleted. Copies of a model
    start with an empty cache.
    """

    def __init__(self) -> None:
        self._entry: _Entry | None = None

    @staticmethod
    def is_possible(input: Tensor, dictionary: Tensor) -> bool:  # noqa: A002 (as `nn.Linear` calls it)
        """Return whether calls on this input may share a product.

        They may not while autograd records, as each call's graph must be free to be released, recomputed and run
        backward independently; nor in inference mode or while compiling, where modifications of a tensor cannot be
        detected; in a graph with gradients the compiler merges equal products itself.
        """
        if torch.compiler.is_compiling() or input.is_inference() or dictionary.is_inference():
            return False
        return not (torch.is_grad_enabled() and (input.requires_grad or dictionary.requires_grad))

    def take(self, input: Tensor, dictionary: Tensor) -> Tensor | None:  # noqa: A002
        """Return the product if an earlier call on this input stored it, else None.

        A dictionary that has been offloaded to the meta device again counts as unchanged.
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
        """Store the product for `uses` further calls."""
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
    """Return the dtype that autocast computes products with the tensor in; None if autocast is off."""
    device = tensor.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None
