import pytest
import torch

from rocket_core.layers import row_layout
from rocket_core.layers.code_tensors import pack_codes, pack_scales
from rocket_core.layers.row_layout import RowLayout, multiply, multiply_codes
from rocket_core.sizes.code_format import CODE_BITS, CodeFormat, coded_format
from tests.reference.stored_layers import EXPONENT, make_rounded, rounded_weight
from tests.sampling import sweep

# Inputs, outputs, size of groups and bits of scales: of words and blocks that are whole and that are not.
LAYERS = [
    (7, 5, 3, 6),
    (16, 9, 8, 6),
    (72, 5, 72, 16),
    (48, 33, 16, 6),
    (136, 3, 24, 8),
    (208, 4, 64, 16),
    (96, 7, 64, 6),
    (272, 5, 128, 8),
    (160, 9, 32, 6),
    (96, 7, 96, 16),
]


def inputs(n, d_in, dtype=torch.float32):
    return torch.randn(n, d_in, generator=torch.Generator().manual_seed(1)).to(dtype)


def make_table(code_format, d_in, d_out, *, codes=None):
    """Return a rounded weight, and its layout, table and scales; with codes it is entropy coded."""
    rounded = make_rounded(code_format, d_in, d_out)
    if codes is not None:
        rounded.codes.copy_(codes)
    layout = RowLayout.of((d_in, d_out), code_format, EXPONENT, entropy_coded=codes is not None)
    return rounded, layout, layout.fill(rounded.codes), pack_scales(rounded.scales)


def check_products(rounded, layout, table, scales):
    """Compare products with those of the dense weight, for numbers of rows that are computed in each way."""
    d_in, d_out = rounded.shape
    weight = rounded_weight(rounded).T
    for n in (0, 1, row_layout._MOST_ROWS, 11):
        rows = inputs(n, d_in)
        product = layout.multiply(rows, table, scales)
        assert product.shape == (n, d_out)
        # Rounding of float32, in proportion to the sum of absolute values.
        bound = 2e-6 * (rows.double().abs() @ weight.abs()).amax().item() if n else 0
        torch.testing.assert_close(product.double(), rows.double() @ weight, rtol=0, atol=bound)


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("layer", sweep([(layer,) for layer in LAYERS[::2]], soak=[(layer,) for layer in LAYERS[1::2]]))
def test_products_are_those_of_the_dense_weight(bits, layer):
    d_in, d_out, group_size, scale_bits = layer
    code_format = CodeFormat(bits=bits, group_size=group_size, scale_bits=scale_bits)
    rounded, layout, table, scales = make_table(code_format, d_in, d_out)
    assert torch.equal(table, pack_codes(rounded)["weight"])
    assert layout.most_bytes == table.nbytes
    assert torch.equal(layout.codes(table), rounded.codes)
    check_products(rounded, layout, table, scales)


@pytest.mark.parametrize("shape", [(8, 3), (72, 5), (192, 7)])
def test_entropy_coded_codes_take_the_bits_of_their_block(shape):
    # The largest magnitudes in blocks of 64 inputs need 2 to 8 bits.
    codes = torch.randint(-2, 2, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    blocks = [(first, output) for first in range(0, shape[0], 64) for output in range(shape[1])]
    expected = 0
    for number, (first, output) in enumerate(blocks):
        bits, size = 2 + number % 7, min(64, shape[0] - first)
        codes[first + number % size, output] = (2 ** (bits - 1) - 1) * (-1) ** number
        expected += 1 + bits * size // 8
    rounded, layout, table, scales = make_table(coded_format(shape[0]), *shape, codes=codes)
    assert layout.bits == 0
    assert 0 <= table.nbytes - expected - 8 * shape[1] <= 16
    assert table.nbytes <= layout.most_bytes
    assert torch.equal(layout.codes(table), codes)
    check_products(rounded, layout, table, scales)


@pytest.mark.parametrize("coded", [False, True])
def test_prompts_are_multiplied_as_with_a_dense_bfloat16_weight(coded, monkeypatch):
    monkeypatch.setattr(row_layout, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(row_layout, "_DECODED", 200)
    code_format = coded_format(96) if coded else CodeFormat(bits=5, group_size=16, scale_bits=6)
    codes = make_rounded(code_format, 96, 13).codes if coded else None
    rounded, layout, table, scales = make_table(code_format, 96, 13, codes=codes)
    rows = inputs(9, 96, torch.bfloat16)
    expected = rows.double() @ rounded.rows(torch.bfloat16).double().T
    bound = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(layout.multiply(rows, table, scales).double(), expected, rtol=2**-8, atol=bound)


def test_threads_do_not_change_the_product(monkeypatch):
    monkeypatch.setattr(row_layout, "_CODES_PER_THREAD", 1)
    _, layout, table, scales = make_table(CodeFormat(bits=3, group_size=8, scale_bits=6), 40, 70)
    before, products = torch.get_num_threads(), []
    try:
        for number in (1, 3, 16):
            torch.set_num_threads(number)
            products.append(layout.multiply(inputs(3, 40), table, scales))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(product, products[0]) for product in products)


def test_without_numba_the_weight_is_decoded_by_torch(monkeypatch):
    monkeypatch.setattr(row_layout, "_kernels", lambda: None)
    rounded, layout, table, scales = make_table(
        coded_format(64), 64, 9, codes=make_rounded(coded_format(64), 64, 9).codes
    )
    assert layout.bits == 8
    check_products(rounded, layout, table, scales)


@pytest.mark.parametrize("group_size", [8, 32])
def test_the_compiled_operation_describes_its_result(group_size):
    _, layout, table, scales = make_table(CodeFormat(bits=4, group_size=group_size, scale_bits=8), 64, 70)
    assert RowLayout(*layout.numbers) == layout
    for n in (2, 40):
        arguments = (inputs(n, 64, torch.bfloat16), table, scales)
        torch.library.opcheck(multiply_codes, (*arguments, layout.numbers))
        assert torch.equal(multiply_codes(*arguments, layout.numbers), multiply(layout, *arguments))
