"""Forms in which a layer's codes are computed with on a CPU."""

from typing import TypeAlias

import torch
from torch import Tensor

from rocket_core.layers.int4_table import Int4Layout
from rocket_core.layers.row_layout import RowLayout
from rocket_core.sizes.code_format import CodeFormat

CodeLayout: TypeAlias = Int4Layout | RowLayout

_KINDS: tuple[type[CodeLayout], ...] = (RowLayout, Int4Layout)


def layout_of(
    shape: tuple[int, int], code_format: CodeFormat, exponent: int, dtype: torch.dtype, *, entropy_coded: bool = False
) -> CodeLayout:
    """Return the fastest form of codes that this CPU computes with and that takes about the bytes of the file.

    Args:
        shape: `(d_in, d_out)` of the layer.
        code_format: its format.
        exponent: see `Scales.exponent`.
        dtype: dtype of its inputs and outputs.
        entropy_coded: whether its codes are entropy coded on disk.
    """
    int4 = None if entropy_coded else Int4Layout.of(shape, code_format, dtype)
    return int4 or RowLayout.of(shape, code_format, exponent, entropy_coded=entropy_coded)


def multiply(layout: CodeLayout, rows: Tensor, table: Tensor, scales: Tensor) -> Tensor:
    """Return `rows @ W̃`, as one operation for `torch.compile`."""
    if torch.compiler.is_compiling():
        product: Tensor = multiply_codes(rows, table, scales, [_KINDS.index(type(layout)), *layout.numbers])
        return product
    return layout.multiply(rows, table, scales)


@torch.library.custom_op("rocket::multiply_codes", mutates_args=())
def multiply_codes(rows: Tensor, table: Tensor, scales: Tensor, layout: list[int]) -> Tensor:
    """Multiply as `multiply` does."""
    kind, *numbers = layout
    return _KINDS[kind](*numbers).multiply(rows, table, scales).contiguous()  # type: ignore[arg-type]


@multiply_codes.register_fake
def _product_of_codes(rows: Tensor, _table: Tensor, _scales: Tensor, layout: list[int]) -> Tensor:
    kind, _, d_out, *_ = layout
    dtype = torch.float32 if _KINDS[kind] is RowLayout else rows.dtype
    return rows.new_empty(rows.shape[0], d_out, dtype=dtype)
