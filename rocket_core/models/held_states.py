"""Hidden states that are held in a narrower dtype than they are computed in."""

from collections.abc import MutableSequence
from typing import Any

import torch
from torch import Tensor


class HeldStates(MutableSequence[Tensor]):
    """A list of hidden states, each rounded when it is stored and widened again when it is read.

    Rounding to the dtype of a model's weights loses what the model itself loses between two blocks where it runs in
    that dtype.

    Args:
        dtype: dtype in memory.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._held: list[tuple[Tensor, torch.dtype]] = []

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._held)

    def __getitem__(self, index: Any) -> Any:
        """Return a tensor in the dtype that it was computed in, or some of them as they are held."""
        if isinstance(index, slice):
            part = HeldStates(self._dtype)
            part._held = self._held[index]
            return part
        tensor, computed = self._held[index]
        return tensor.to(computed)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Round and store one tensor, or several."""
        if isinstance(index, slice):
            self._held[index] = [self._rounded(tensor) for tensor in value]
        else:
            self._held[index] = self._rounded(value)

    def __delitem__(self, index: int | slice) -> None:
        """Forget tensors."""
        del self._held[index]

    def insert(self, index: int, value: Tensor) -> None:
        """Round and store a tensor in front of another one."""
        self._held.insert(index, self._rounded(value))

    def _rounded(self, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        return tensor.to(self._dtype), tensor.dtype
