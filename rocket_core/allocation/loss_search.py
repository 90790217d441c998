"""The search for the smallest model whose measured loss is within a bound, round by round."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rocket_core.allocation.allocator import Allocation
from rocket_core.errors import InfeasibleBudgetError
from rocket_core.report.loss_rounds import LossRound
from rocket_core.sizes.target import ByLoss

# Part of the bound to aim at, as the next measurement differs a little from what the ratio of the earlier ones says.
_AIM = 0.97
# How many times the loss may grow from one round to the next: a loss near 0 is mostly noise.
_MOST_GROWTH = 8.0
# Between measured and predicted loss, a larger power or a smaller root is noise.
_MOST_POWER = 2.0
# After so many rounds that all missed the bound, the least loss is tried; after so many in all, the search ends.
_MISSED_ROUNDS, MOST_ROUNDS = 3, 8
# Part of the file that one more round has to save.
_LEAST_SAVING = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class LossStep:
    """What to do next.

    Attributes:
        sought: upper bound on the predicted loss, in nats per token.
        allocation: the smallest one within it.
        is_result: whether it was tried and is the result; else it is to be compressed and measured.
    """

    sought: float
    allocation: Allocation
    is_result: bool


def next_step(rounds: Sequence[LossRound], target: ByLoss, allocate: Callable[[float], Allocation]) -> LossStep:
    """Return the next size to try, or the smallest that was within the bound if another would hardly save anything.

    Args:
        rounds: earlier rounds, in order.
        target: the bound.
        allocate: returns the smallest allocation whose predicted loss is at most a number, or that with the least loss;
            see `Predictor.within_loss`.

    Raises:
        InfeasibleBudgetError: the largest allocation, or each that was tried, exceeds the bound.
    """
    within = [tried for tried in rounds if tried.measured <= target.nats]
    best = min(within, key=lambda tried: tried.stored_bytes, default=None)
    sought = next_loss(rounds, target.nats) if best or len(rounds) < _MISSED_ROUNDS else 0.0
    step = LossStep(sought=sought, allocation=allocate(sought), is_result=False)
    is_tried = any(step.allocation == allocate(tried.sought) for tried in rounds)
    if best is None:
        if is_tried:
            least = min(rounds, key=lambda tried: tried.measured)
            raise InfeasibleBudgetError(
                f"a {target.text} is out of reach: the least that was measured is {least.measured:.3g} nats per token, "
                f"with files of {least.stored_bytes:,} bytes; ask for that or more",
                nearest_ratio=0.0,
            )
        return step
    result = LossStep(sought=best.sought, allocation=allocate(best.sought), is_result=True)
    saved = result.allocation.kept - step.allocation.kept
    is_close = saved <= _LEAST_SAVING * best.stored_bytes
    return result if is_tried or is_close or len(rounds) >= MOST_ROUNDS else step


def next_loss(rounds: Sequence[LossRound], bound: float) -> float:
    """Return the predicted loss to allocate for next, in nats per token.

    It follows from the round whose measured loss is nearest to the bound, as the measured loss grows with a power of
    the predicted one: that of the two nearest rounds, or 1. What is not between a loss that was measured within the
    bound and a larger one that was not is replaced by their geometric mean.

    Args:
        rounds: earlier rounds, in order.
        bound: the most that may be measured, in nats per token, above 0.
    """
    if not rounds:
        return bound
    nearest, *others = sorted(rounds, key=lambda tried: _distance(tried, bound))
    growth = _MOST_GROWTH
    if nearest.measured > 0:
        growth = min(growth, (_AIM * bound / nearest.measured) ** (1 / (_power(nearest, others[0]) if others else 1)))
    found = nearest.predicted * growth
    missed = min((tried.predicted for tried in rounds if tried.measured > bound), default=math.inf)
    met = max((tried.predicted for tried in rounds if tried.measured <= bound and tried.predicted < missed), default=0)
    if met < found < missed:
        return found
    if missed == math.inf:
        return met
    return (met * missed) ** 0.5 if met else _AIM * missed


def _distance(tried: LossRound, bound: float) -> float:
    return abs(math.log(tried.measured / bound)) if tried.measured > 0 else math.inf


def _power(one: LossRound, other: LossRound) -> float:
    if min(one.measured, other.measured, one.predicted, other.predicted) <= 0 or one.predicted == other.predicted:
        return 1.0
    power = math.log(other.measured / one.measured) / math.log(other.predicted / one.predicted)
    return min(max(power, 1 / _MOST_POWER), _MOST_POWER)
