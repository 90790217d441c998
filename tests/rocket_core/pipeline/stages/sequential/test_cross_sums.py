"""Sums of weighted tokens against products with the whole matrices."""

import pytest
import torch

from rocket_core.linalg.whitening import shrunk_gram
from rocket_core.pipeline.stages.sequential.cross_sums import CrossSums


def test_weighted_sums_are_those_of_weighted_rows():
    torch.manual_seed(0)
    compressed, dense, lacking = torch.randn(30, 4), torch.randn(30, 4), torch.randn(30, 3)
    weights = torch.rand(30)
    sums = CrossSums(weights=weights)
    for begin, end in ((0, 12), (12, 30)):
        sums.add(compressed[begin:end], dense[begin:end], lacking[begin:end], first=0.5)

    diagonal = weights.double().diag()
    compressed, dense, lacking = compressed.double(), dense.double(), lacking.double()
    torch.testing.assert_close(sums.total.gram, compressed.T @ diagonal @ compressed, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.total.cross, compressed.T @ diagonal @ dense, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.dense_gram, dense.T @ diagonal @ dense, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.total.deviation, compressed.T @ diagonal @ lacking, rtol=1e-5, atol=1e-5)
    assert sums.tokens == 30


def test_the_gram_matrix_of_weighted_tokens_is_shrunk():
    rows = torch.randn(50, 4)
    # As many as 20 tokens count.
    weights = torch.cat([torch.full((20,), 2.5), torch.zeros(30)])
    sums = CrossSums(weights=weights)
    sums.add(rows, rows, first=0.5)
    torch.testing.assert_close(sums.fitted_gram, shrunk_gram(sums.total.gram, 20, 0.5))


def streams(seed=0, tokens=400, d_in=6):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(tokens, d_in, generator=generator)
    return dense, torch.randn(tokens, d_in, generator=generator), torch.randn(d_in, 5, generator=generator).double()


def test_tokens_of_weight_are_repaired():
    """What only some tokens lack is made up for those that count."""
    dense, noise, weight = streams()
    counting = torch.arange(400) % 2 == 0
    compressed = torch.where(counting[:, None], 0.8, 1.2) * dense + 0.05 * noise

    def missed(weights):
        sums = CrossSums(weights=weights)
        sums.add(compressed, dense, first=0.5)
        target = sums.target(weight, 0.0)
        return (dense[counting].double() @ weight - compressed[counting].double() @ target).norm()

    assert missed(counting.float()) < 0.7 * missed(torch.ones(400))


def part_of_the_way(dense, compressed, weight, deviation=None):
    """Return the part by which the target of all rows, in two batches, is on the way to the least squares solution."""
    sums = CrossSums()
    middle = len(dense) // 2
    for rows, first in ((slice(middle), 1.0), (slice(middle, None), 0.0)):
        sums.add(compressed[rows], dense[rows], None if deviation is None else deviation[rows], first=first)
    wanted = dense.double() @ weight + (0 if deviation is None else deviation.double())
    way = torch.linalg.lstsq(compressed.double(), wanted).solution - weight
    change = sums.target(weight, 0.0) - weight
    part = float((change * way).sum() / way.square().sum())
    torch.testing.assert_close(change, part * way, rtol=1e-4, atol=1e-5)
    return part


def test_what_both_halves_lack_is_mostly_made_up_for():
    dense, noise, weight = streams()
    assert part_of_the_way(dense, 0.7 * dense + 0.01 * noise, weight) == pytest.approx(0.6, abs=1e-4)
    deviation = (dense @ torch.randn(6, 5)) * 0.1
    assert part_of_the_way(dense, dense, weight, deviation) == pytest.approx(0.6, abs=1e-4)


def test_what_one_half_lacks_by_chance_is_not():
    dense, _, weight = streams(d_in=30)
    _, chance, _ = streams(seed=1, d_in=5)
    assert part_of_the_way(dense, dense, weight, chance) < 0.2


def test_the_step_is_that_of_the_other_half():
    dense, noise, weight = streams(tokens=60, d_in=6)
    deviation = 0.3 * dense[:, :5] + streams(seed=2, tokens=60, d_in=5)[1]
    compressed = dense + 0.3 * noise
    halves = slice(30), slice(30, None)
    along = energy = 0.0
    for own, other in (halves, halves[::-1]):
        lacking = dense.double() @ weight + deviation.double() - compressed.double() @ weight
        change = torch.linalg.lstsq(compressed[own].double(), lacking[own]).solution
        answered = compressed[other].double() @ change
        along, energy = along + float((answered * lacking[other]).sum()), energy + float(answered.square().sum())
    assert 0.05 < along / energy < 0.55
    assert part_of_the_way(dense, compressed, weight, deviation) == pytest.approx(along / energy, rel=1e-3)


def test_a_batch_may_belong_to_both_halves():
    rows = torch.arange(12.0)[:, None]
    sums = CrossSums()
    for batch, first in zip(rows.split([5, 4, 3]), (1.0, 0.5, 0.0), strict=True):
        sums.add(batch, batch, first=first)
    first, second = rows[:7].double(), rows[7:].double()
    assert torch.equal(sums.halves[0].gram, first.T @ first)
    assert torch.equal(sums.halves[1].gram, second.T @ second)
    assert [half.tokens for half in sums.halves] == [7, 5]


def test_one_token_changes_nothing():
    dense, noise, weight = streams(tokens=1)
    sums = CrossSums()
    sums.add(noise, dense, first=0.5)
    assert torch.equal(sums.target(weight, 0.05), weight)
