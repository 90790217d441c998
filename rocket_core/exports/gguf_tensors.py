"""How tensors of a checkpoint are written into a GGUF file. Loads no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rocket_core.exports.gguf_file import Storage


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRules:
    """How a tensor of a checkpoint is written.

    Attributes:
        name: its name in the file.
        head_rows: rows of a head whose two halves are interleaved; 0 if rows stay in place.
        shift: what is added to each number.
        exact: whether it is stored as F32, as vectors always are.
        flat: whether it is written as a vector.
        expert: its place in a tensor of all experts; None if it is a tensor by itself.
    """

    name: str
    head_rows: int = 0
    shift: float = 0.0
    exact: bool = False
    flat: bool = False
    expert: int | None = None

    def form(self, shape: Sequence[int], wanted: Storage) -> tuple[tuple[int, ...], Storage]:
        """Return the shape that is written, and how its numbers are stored.

        Args:
            shape: shape of the tensor.
            wanted: storage for matrices.
        """
        written = (math.prod(shape),) if self.flat else tuple(shape)
        return written, "F32" if self.exact or len(written) == 1 else wanted

    def row_order(self, rows: int) -> list[int] | None:
        """Return for each row of the file the row of the checkpoint; None if rows stay in place.

        Args:
            rows: rows of the tensor, whole heads.
        """
        if not self.head_rows:
            return None
        assert rows % self.head_rows == 0, (self.name, rows, self.head_rows)
        half = self.head_rows // 2
        within = [place + side * half for place in range(half) for side in range(2)]
        return [begin + place for begin in range(0, rows, self.head_rows) for place in within]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTensor:
    """A tensor of the file that is written from tensors of the checkpoint.

    Attributes:
        name: its name.
        shape: its shape, in torch's order.
        storage: how its numbers are stored.
        parts: names in the checkpoint, each with its rules: of one tensor, or of every expert's in their order.
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage
    parts: Mapping[str, TensorRules]
