"""Sums of weighted tokens against products with the whole matrices."""

import torch

from rocket_core.linalg.whitening import shrunk_gram
from rocket_core.pipeline.stages.sequential.cross_sums import CrossSums


def test_weighted_sums_are_those_of_weighted_rows():
    torch.manual_seed(0)
    compressed, dense, lacking = torch.randn(30, 4), torch.randn(30, 4), torch.randn(30, 3)
    weights = torch.rand(30)
    sums = CrossSums(weights=weights)
    for begin, end in ((0, 12), (12, 30)):
        sums.add(compressed[begin:end], dense[begin:end])
        sums.add_deviation(compressed[begin:end], lacking[begin:end])

    diagonal = weights.double().diag()
    compressed, dense, lacking = compressed.double(), dense.double(), lacking.double()
    torch.testing.assert_close(sums.gram, compressed.T @ diagonal @ compressed, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.cross, compressed.T @ diagonal @ dense, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.dense_gram, dense.T @ diagonal @ dense, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        sum(half.deviation for half in sums.halves), compressed.T @ diagonal @ lacking, rtol=1e-5, atol=1e-5
    )
    assert sums.tokens == 30


def test_the_gram_matrix_of_weighted_tokens_is_shrunk():
    rows = torch.randn(50, 4)
    # As many as 20 tokens count.
    weights = torch.cat([torch.full((20,), 2.5), torch.zeros(30)])
    sums = CrossSums(weights=weights)
    sums.add(rows, rows)
    torch.testing.assert_close(sums.fitted_gram, shrunk_gram(sums.gram, 20, 0.5))


def test_weights_of_one_token_repair_that_token():
    """A target with all weight on a token that is read twice gives its output, whatever the others need."""
    torch.manual_seed(1)
    dense = torch.randn(40, 3)
    compressed = dense + 0.1 * torch.randn(40, 3)
    dense[27], compressed[27] = dense[7], compressed[7]
    weight = torch.randn(3, 5).double()

    def missed(weights):
        sums = CrossSums(weights=weights)
        sums.add(compressed, dense)
        target = sums.target(weight, 0.0)
        return (dense[7].double() @ weight - compressed[7].double() @ target).norm()

    at_once = torch.zeros(40)
    at_once[[7, 27]] = 20.0
    assert missed(at_once) < missed(torch.ones(40))
