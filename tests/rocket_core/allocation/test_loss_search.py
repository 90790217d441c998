"""The search for a size by its measured loss, on a model whose loss is a known function of the predicted one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_core.allocation import Allocation
from rocket_core.allocation.loss_search import next_loss, next_step
from rocket_core.errors import InfeasibleBudgetError
from rocket_core.report.loss_rounds import LossRound
from rocket_core.sizes.target import ByLoss

DENSE = 1_000_000


def allocate(nats):
    """Return one of a thousand sizes: the loss doubles with every 45 kB, from 1e-6 at 1 MB to 1 at 100 kB."""
    step = max((step for step in range(1001) if 1e-6 ** (1 - step / 1000) <= nats), default=0)
    return Allocation.model_construct(total_error=1e-6 ** (1 - step / 1000), kept=DENSE - 900 * step)


def search(bound, measure):
    """Return the rounds and the result of a search."""
    rounds = []
    target = ByLoss(measure="max_kl", bound=bound)
    while True:
        step = next_step(rounds, target, allocate)
        if step.is_result:
            return rounds, step.allocation
        found = step.allocation
        rounds.append(
            LossRound(
                sought=step.sought,
                predicted=found.total_error,
                measured=measure(found.total_error),
                stored_bytes=found.kept,
            )
        )
        assert len(rounds) <= 12


@settings(deadline=None, max_examples=150)
@given(
    bound=st.floats(3e-4, 0.1),
    factor=st.floats(0.4, 3.0),
    power=st.floats(0.7, 1.4),
    noise=st.floats(0.0, 0.02),
    seed=st.integers(0, 100),
)
def test_the_result_is_within_the_bound_and_nearly_the_smallest(bound, factor, power, noise, seed):
    def exact(loss):
        return factor * bound * (loss / bound) ** power

    def measure(loss):
        return exact(loss) * (1 + noise * ((hash((round(loss * 1e9), seed)) % 201) / 100 - 1))

    rounds, result = search(bound, measure)
    assert measure(result.total_error) <= bound
    assert len(rounds) <= 8
    # Two measurements differ by up to twice the noise, so the search cannot tell sizes apart whose losses differ less.
    told_apart = bound * (1 - noise) / (1 + noise)
    smallest = min(
        found.kept
        for found in (allocate(10 ** (step / 100 - 6)) for step in range(601))
        if exact(found.total_error) <= told_apart
    )
    assert result.kept <= 1.03 * smallest


def test_exact_predictions_take_two_rounds():
    rounds, result = search(0.02, lambda loss: 1.7 * loss)
    assert len(rounds) == 2
    assert 0.019 < rounds[-1].measured <= 0.02
    assert result.total_error == rounds[-1].predicted


def test_the_search_goes_on_from_the_nearest_of_three_misses():
    misses = iter([0.253, 0.129, 0.101])
    rounds, result = search(0.1, lambda loss: next(misses, 0.253 * (loss / 0.1) ** 0.7))
    assert len(rounds) <= 6
    assert 0.022 < result.total_error < 0.0265


def test_a_generous_bound_takes_the_smallest_size():
    rounds, result = search(30.0, lambda loss: loss)
    assert result == allocate(1.0)
    assert len(rounds) == 1


def test_a_bound_that_no_size_meets_names_the_least_loss():
    with pytest.raises(InfeasibleBudgetError, match=r"at most 0\.01 nats.* least that was measured is 0\.05"):
        search(0.01, lambda loss: 0.05 + loss)


def test_a_bound_that_only_the_largest_meets_is_met():
    rounds, result = search(0.01, lambda loss: 0.0 if loss <= 1e-6 else 0.05 + loss)
    assert result.kept == DENSE
    assert min(tried.measured for tried in rounds) == 0.0


def test_the_next_loss_lies_between_what_was_met_and_missed():
    def tried(predicted, measured):
        return LossRound(sought=predicted, predicted=predicted, measured=measured, stored_bytes=1)

    # The nearest round says less than what was already met.
    assert next_loss([tried(0.004, 0.012), tried(0.003, 0.0099)], 0.01) == pytest.approx((0.004 * 0.003) ** 0.5)
    assert next_loss([tried(0.004, 0.012), tried(0.002, 0.001)], 0.01) == pytest.approx(0.004 * (0.97 / 1.2) ** 0.5)
    assert next_loss([tried(0.01, 0.02)], 0.01) == pytest.approx(0.01 * 0.97 / 2)
    # A loss of nothing says only that more is possible.
    assert next_loss([tried(0.01, 0.0)], 0.01) == pytest.approx(0.08)
