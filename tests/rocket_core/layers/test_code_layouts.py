import pytest
import torch

from rocket_core.layers.code_layouts import layout_of, multiply, multiply_codes
from rocket_core.layers.code_tensors import pack_scales
from rocket_core.layers.int4_table import Int4Layout, kernel_outputs
from rocket_core.layers.row_layout import RowLayout
from rocket_core.sizes.code_format import CodeFormat
from tests.reference.stored_layers import make_rounded

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [8, 32])
def test_the_fastest_form_is_chosen(dtype, group_size):
    layout = layout_of((64, 40), CodeFormat(bits=4, group_size=group_size, scale_bits=8), -5, dtype)
    suits = kernel_outputs() is not None and dtype == torch.bfloat16 and group_size == 32
    assert type(layout) is (Int4Layout if suits else RowLayout)
    assert type(layout)(*layout.numbers) == layout


@pytest.mark.parametrize("group_size", [8, 32])
def test_the_compiled_operation_describes_its_result(group_size):
    code_format = CodeFormat(bits=4, group_size=group_size, scale_bits=8)
    rounded = make_rounded(code_format, 64, 70)
    layout = layout_of((64, 70), code_format, rounded.scales.exponent, torch.bfloat16)
    table, scales = layout.fill(rounded.codes), pack_scales(rounded.scales)
    if isinstance(layout, Int4Layout):
        scales = layout.scales(rounded.scales)
    kind = 1 if isinstance(layout, Int4Layout) else 0
    for n in (2, 40):
        rows = torch.randn(n, 64).bfloat16()
        arguments = (rows, table, scales, [kind, *layout.numbers])
        torch.library.opcheck(multiply_codes, arguments)
        assert torch.equal(multiply_codes(*arguments), multiply(layout, rows, table, scales))
