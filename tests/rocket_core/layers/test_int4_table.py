import pytest
import torch

from rocket_core.layers import int4_table
from rocket_core.layers.int4_table import Int4Layout, kernel_outputs
from rocket_core.sizes.code_format import CodeFormat
from tests.reference.stored_layers import make_rounded, rounded_weight

pytestmark = pytest.mark.skipif(kernel_outputs() is None, reason="needs AVX2 or AVX-512")

# Inputs, outputs, size of groups and bits of scales.
LAYERS = [(32, 5, 32, 8), (96, 40, 64, 16), (128, 130, 64, 16), (192, 64, 2**20, 16), (512, 70, 2**20, 16)]


AVX512 = kernel_outputs() == 64
BITS = [4, *([8] if AVX512 else [])]


def make_table(d_in, d_out, group_size, scale_bits, bits=4):
    if bits > 4:  # in two parts, for larger groups
        d_in, group_size = 2 * d_in, 2 * group_size
    code_format = CodeFormat(bits=bits, group_size=min(group_size, d_in), scale_bits=scale_bits)
    rounded = make_rounded(code_format, d_in, d_out)
    layout = Int4Layout.of((d_in, d_out), code_format, torch.bfloat16)
    return rounded, layout, layout.fill(rounded.codes), layout.scales(rounded.scales)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("layer", LAYERS)
def test_products_are_rounded_once(layer, bits):
    rounded, layout, table, scales = make_table(*layer, bits=bits)
    assert torch.equal(layout.codes(table), rounded.codes)
    assert layout.most_bytes == table.nbytes + scales.nbytes
    d_in, d_out = rounded.shape
    by_input = rounded.scales.by_input(d_in, torch.float32).bfloat16()
    weight = by_input.double() * rounded.codes
    generator = torch.Generator().manual_seed(1)
    for n in (0, 1, 2, 3, 4, 7):
        rows = torch.randn(n, d_in, generator=generator).bfloat16()
        product = layout.multiply(rows, table, scales)
        assert torch.equal(product, product.bfloat16())
        assert product.shape == (n, d_out)
        bound = 2e-6 * (rows.double().abs() @ weight.abs()).amax().item() if n else 0
        torch.testing.assert_close(product.double(), rows.double() @ weight, rtol=1.01 * 2**-8, atol=bound)


@pytest.mark.parametrize("layer", LAYERS)
def test_no_entry_is_rounded_by_more_than_a_dense_one(layer):
    rounded, layout, _, scales = make_table(*layer)
    d_in, d_out, *_ = layer
    weight = rounded_weight(rounded).T
    used = scales[:, :d_out, 0].repeat_interleave(layout.group_size, dim=0).double() * rounded.codes
    torch.testing.assert_close(used, weight, rtol=2**-8, atol=0)
    assert not scales[..., 1].any()
    assert used.shape == (d_in, d_out)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_many_rows_are_multiplied_with_the_dense_weight(layer, native, bits, monkeypatch):
    monkeypatch.setattr(int4_table, "multiplies_bfloat16", lambda: native)
    _, layout, table, scales = make_table(*layer, bits=bits)
    rows = torch.randn(7 * 19, layout.d_in, generator=torch.Generator().manual_seed(1)).bfloat16()
    by_kernel = torch.cat([layout.multiply(part, table, scales) for part in rows.split(7)])
    for decoded_bytes in (1, int4_table._DECODED_BYTES):
        monkeypatch.setattr(int4_table, "_DECODED_BYTES", decoded_bytes)
        product = layout.multiply(rows, table, scales)
        assert product.shape == by_kernel.shape
        torch.testing.assert_close(product, by_kernel, rtol=2**-6, atol=2**-7 * by_kernel.abs().max().item())


@pytest.mark.parametrize(
    ("bits", "group_size", "d_in", "dtype"),
    [
        (4, 16, 64, torch.bfloat16),
        (4, 32, 48, torch.bfloat16),
        (4, 48, 48, torch.bfloat16),
        (2, 32, 64, torch.bfloat16),
        (8, 32, 64, torch.bfloat16),
        (4, 32, 64, torch.float16),
        (4, 32, 64, torch.float32),
    ],
)
def test_other_layers_have_no_such_table(bits, group_size, d_in, dtype):
    code_format = CodeFormat(bits=bits, group_size=group_size, scale_bits=16)
    assert Int4Layout.of((d_in, 64), code_format, dtype) is None


def test_other_instruction_sets_have_no_such_table(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert kernel_outputs.__wrapped__() is None
    monkeypatch.setattr(int4_table, "kernel_outputs", kernel_outputs.__wrapped__)
    assert Int4Layout.of((64, 64), CodeFormat(bits=4, group_size=32, scale_bits=8), torch.bfloat16) is None
