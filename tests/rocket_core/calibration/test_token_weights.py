import pytest
import torch

from rocket_core.calibration.sensitivity import Sensitivity
from rocket_core.calibration.token_weights import PROFILE_POWER, TokenWeights, _features, _product

WIDTH, LENGTH = 12, 16


def known(gradients):
    return Sensitivity(fisher_diagonal=torch.ones(3, dtype=torch.float64), token_gradients=gradients)


def weights_of(hidden, gradients, measured, layers=("one",), power=PROFILE_POWER):
    found = {"one": known(gradients), "other": known(None)}
    return TokenWeights(found.get, hidden, measured, power=power).of(layers)


def states(windows, seed=0):
    return torch.randn(windows, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_tokens_weigh_one_on_average():
    gradients = torch.tensor([0.1, 1.9, 1.0]).bfloat16()
    weights = weights_of([], gradients, 0, ("one", "other", "unknown"))
    assert float(weights.mean()) == pytest.approx(1)
    assert bool((weights.diff()[[0]] > 0).all())
    assert float(weights[1] / weights[0]) < 19


def test_tokens_of_layers_without_gradients_count_the_same():
    assert weights_of([], torch.ones(3).bfloat16(), 0, ("other", "unknown")) is None


def test_weights_without_gradients_follow_states_and_places():
    hidden = states(96)
    directions = torch.nn.functional.normalize(hidden, dim=2) * WIDTH**0.5
    logarithms = directions @ torch.linspace(-1, 1, WIDTH) + 3 * (torch.arange(LENGTH) == 0)
    gradients = logarithms.flatten().exp()
    measured = 64 * LENGTH
    last = gradients[-measured:] / gradients[-measured:].mean()
    expected = gradients**PROFILE_POWER
    found = weights_of(list(hidden.split(24)), last.bfloat16(), measured)
    assert float(found.mean()) == pytest.approx(1)
    torch.testing.assert_close(found[-measured:] / found[-1], expected[-measured:] / expected[-1], rtol=0.02, atol=0)
    others = slice(None, -measured)
    together = torch.stack([found[others].log(), expected[others].log()])
    assert float(torch.corrcoef(together)[0, 1]) > 0.95
    assert float(found[others].mean() / found[-measured:].mean()) == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("measured", [4 * LENGTH, 0])
def test_logarithms_are_proportional_to_the_power(measured):
    gradients = states(4 if measured else 8, seed=1)[..., 0].flatten().exp().bfloat16()
    strong, mild = (weights_of([states(8)], gradients, measured, power=power) for power in (0.8, 0.2))
    for rows in (slice(-4 * LENGTH, None), slice(4 * LENGTH)):
        expected = strong[rows].log().diff() / 4
        torch.testing.assert_close(mild[rows].log().diff(), expected, rtol=1e-3, atol=1e-3)


def test_predicted_weights_are_at_most_the_largest_fitted_one():
    hidden = states(8)
    hidden[:4] *= 1e6
    found = weights_of([hidden], states(4, seed=1)[..., 0].flatten().exp().bfloat16(), 4 * LENGTH)
    assert bool(torch.isfinite(found).all())
    assert float(found[: 4 * LENGTH].max()) <= float(found[4 * LENGTH :].max()) * 4


def test_a_layer_with_other_rows_than_tokens_counts_all_alike():
    assert weights_of([states(8)], torch.ones(5).bfloat16(), 4 * LENGTH) is None


def test_products_with_features_need_no_features():
    batch, slope = states(3), torch.randn(WIDTH + 5, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(_product(batch, slope), _features(batch) @ slope)
