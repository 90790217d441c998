import pytest
import torch

from rocket_core.layers import code_table
from rocket_core.layers.code_table import TableLayout
from rocket_core.sizes.code_format import CODE_BITS, CodeFormat
from tests.reference.stored_layers import make_rounded, rounded_weight
from tests.sampling import sweep

SHAPES = [(7, 5), (33, 16), (70, 131), (64, 257)]
GROUPS = [(1, 16), (8, 6), (16, 6), (32, 8), (2**20, 16)]


def make_table(code_format, d_in, d_out):
    rounded = make_rounded(code_format, d_in, d_out)
    layout = TableLayout.of((d_in, d_out), code_format)
    return rounded, layout, layout.fill(rounded.codes), layout.scales(rounded.scales)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize(("group_size", "scale_bits"), GROUPS)
@pytest.mark.parametrize("shape", sweep([(SHAPES[0],), (SHAPES[2],)], soak=[(SHAPES[1],), (SHAPES[3],)]))
def test_products_are_those_of_the_dense_weight(bits, group_size, scale_bits, shape):
    code_format = CodeFormat(bits=bits, group_size=min(group_size, shape[0]), scale_bits=scale_bits)
    rounded, layout, table, scales = make_table(code_format, *shape)
    assert torch.equal(layout.codes(table), rounded.codes)
    assert layout.memory_bytes == table.nbytes + scales.nbytes
    weight = rounded_weight(rounded).T
    generator = torch.Generator().manual_seed(1)
    for n in (0, 1, 3, code_table._MOST_ROWS, code_table._MOST_ROWS + 1, 40):
        rows = torch.randn(n, shape[0], generator=generator)
        product = layout.multiply(rows, table, scales)
        assert product.shape == (n, shape[1])
        # Rounding of float32, in proportion to the sum of absolute values.
        bound = 2e-6 * (rows.double().abs() @ weight.abs()).amax().item() if n else 0
        torch.testing.assert_close(product.double(), rows.double() @ weight, rtol=0, atol=bound)


@pytest.mark.parametrize("bits", CODE_BITS)
def test_a_table_takes_hardly_more_than_its_codes(bits):
    layout = TableLayout.of((512, 1024), CodeFormat(bits=bits, group_size=64, scale_bits=16))
    in_table = {2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}[bits]
    # And scales in float32 for every 64 inputs, and 4 or 8 bytes in each row of 128 outputs.
    assert 8 * layout.memory_bytes / (512 * 1024) == in_table + 0.5 + (0.25 if in_table < 8 else 0.5)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_threads_do_not_change_the_product(bits, threads, monkeypatch):
    monkeypatch.setattr(code_table, "_CODES_PER_THREAD", 1)
    code_format = CodeFormat(bits=bits, group_size=8, scale_bits=6)
    _, layout, table, scales = make_table(code_format, 40, 700)
    rows = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    products = []
    for number in (1, 2, 5, 16):
        threads(number)
        products.append(layout.multiply(rows, table, scales))
    assert all(torch.equal(product, products[0]) for product in products)
