import pytest
import torch

from rocket_core.linalg.gram_sum import add_gram, gram_matrix, symmetric


@pytest.mark.parametrize("width", [1, 255, 256, 700])
def test_sums_equal_the_product_of_all_rows(width):
    rows = torch.randn(90, width, generator=torch.Generator().manual_seed(0))
    total = None
    for batch in rows.split(40):
        total = add_gram(total, batch)
    expected = rows.double().T @ rows.double()
    assert total.dtype == torch.float64
    torch.testing.assert_close(total.triu(), expected.triu(), rtol=1e-4, atol=1e-4)
    found = symmetric(total)
    assert found is total
    assert torch.equal(found, found.T)
    torch.testing.assert_close(gram_matrix(rows), expected, rtol=1e-4, atol=1e-4)


def test_rows_can_be_added_after_the_sum_was_read():
    rows = torch.randn(8, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    total = symmetric(add_gram(None, rows[:4]))
    torch.testing.assert_close(symmetric(add_gram(total, rows[4:])), rows.T @ rows)


def test_a_value_that_is_not_finite_appears_on_the_diagonal():
    rows = torch.ones(4, 600)
    rows[1, 300] = float("nan")
    assert add_gram(None, rows).diagonal().isnan().nonzero().flatten().tolist() == [300]
