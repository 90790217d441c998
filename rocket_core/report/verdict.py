"""Whether the result of a compression is what was asked for. Loads no torch."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from rocket_core.config import AcceptanceConfig
from rocket_core.report.expectation import NOISE
from rocket_core.report.loading import LoadingReport
from rocket_core.report.quality import EvaluationReport
from rocket_core.schema import FrozenModel

FAR_FROM_PREDICTED = 10.0
"""How many times the predicted increase of the loss is anomalous: over twice the most in docs/quality-details.md."""

# Fewer tokens say too little about whether an answer repeats itself, and fewer repetitions occur in any text.
_LEAST_TOKENS, _LEAST_REPETITIONS = 16, 3
_MOST_NATS = 700.0


class MeasuredBound(FrozenModel):
    """A bound of `accept`, and what was measured."""

    name: Literal["max_kl", "max_perplexity_increase", "max_task_drop"]
    """name of the bound."""
    bound: float
    """the most that is accepted, in the unit of `accept`."""
    measured: float
    """what was measured, in the same unit; of tasks the largest drop."""
    task: str | None = None
    """the task with the largest drop; null for other bounds."""

    @property
    def holds(self) -> bool:
        """Whether the bound holds."""
        # A drop from 0.73 to 0.72 is one of 0.01, whatever is left of the subtraction.
        return self.measured <= self.bound or math.isclose(self.measured, self.bound)

    @property
    def text(self) -> str:
        """Both numbers in words."""
        if self.name == "max_kl":
            return f"KL divergence {self.measured:.4g} nats per token, at most {self.bound:.3g} accepted"
        what = "perplexity increase" if self.task is None else f"drop in {self.task}"
        return f"{what} {100 * self.measured:.4g} %, at most {100 * self.bound:.3g} % accepted"


class Verdict(FrozenModel):
    """Whether the measured result of a compression is what was asked for."""

    outcome: Literal["accepted", "regressed", "anomalous"]
    """`accepted`: all bounds hold; `regressed`: one does not; `anomalous`: whatever the bounds, the measured loss is
    far above the predicted one, an answer is empty or repeats itself where the original's does not, or the engine
    does not run the export, or computes something else than its weights say.
    """
    bounds: tuple[MeasuredBound, ...]
    """the bounds that were given, each with what was measured."""
    reasons: tuple[str, ...] = ()
    """why the result is not accepted; empty if it is."""

    @property
    def is_accepted(self) -> bool:
        """Whether the result is accepted."""
        return self.outcome == "accepted"

    @property
    def text(self) -> str:
        """The verdict in words, with the numbers that it is based on."""
        return f"{self.outcome}: {'; '.join(self.reasons or (bound.text for bound in self.bounds))}"


def judge(
    accept: AcceptanceConfig,
    evaluation: EvaluationReport,
    predicted: float | None,
    loadings: Iterable[LoadingReport] = (),
) -> Verdict:
    """Return the verdict on a result.

    Args:
        accept: what is accepted.
        evaluation: what was measured, of a model that predicts tokens, and of tasks if these have a bound.
        predicted: predicted increase of the loss, in nats per token; None if it is not known.
        loadings: what engines made of the exports.
    """
    bounds = tuple(_measured_bounds(accept, evaluation))
    refused = (loading.anomaly for loading in loadings if loading.anomaly is not None)
    anomalies = (*_unpredicted_loss(evaluation, predicted), *_spoilt_answers(evaluation), *refused)
    exceeded = tuple(bound.text for bound in bounds if not bound.holds)
    outcome: Literal["accepted", "regressed", "anomalous"] = "regressed" if exceeded else "accepted"
    return Verdict(outcome="anomalous" if anomalies else outcome, bounds=bounds, reasons=(*anomalies, *exceeded))


def _measured_bounds(accept: AcceptanceConfig, evaluation: EvaluationReport) -> Iterator[MeasuredBound]:
    if accept.max_kl is not None:
        divergence = evaluation.difference.kl_divergence
        assert divergence is not None, "accept is refused for models that predict no tokens"
        yield MeasuredBound(name="max_kl", bound=accept.max_kl, measured=divergence)
    if accept.max_perplexity_increase is not None:
        increase = math.expm1(min(_loss_increase(evaluation), _MOST_NATS))
        yield MeasuredBound(name="max_perplexity_increase", bound=accept.max_perplexity_increase, measured=increase)
    if accept.max_task_drop is not None:
        pairs = zip(evaluation.before.tasks, evaluation.after.tasks, strict=True)
        drop, task = max((before.value - after.value, f"{after.task}, {after.metric}") for before, after in pairs)
        yield MeasuredBound(name="max_task_drop", bound=accept.max_task_drop, measured=drop, task=task)


def _loss_increase(evaluation: EvaluationReport) -> float:
    before, after = evaluation.before.negative_log_likelihood, evaluation.after.negative_log_likelihood
    assert before is not None, "accept is refused for models that predict no tokens"
    assert after is not None, "both models are measured alike"
    return after - before


def _unpredicted_loss(evaluation: EvaluationReport, predicted: float | None) -> Iterator[str]:
    increase = _loss_increase(evaluation)
    if predicted is not None and increase > FAR_FROM_PREDICTED * predicted + NOISE:
        yield (
            f"loss {increase:.3g} nats per token higher, where {predicted:.3g} was predicted: more than "
            f"{FAR_FROM_PREDICTED:g} times as much points to a fault, or to text unlike that of the calibration"
        )


def _spoilt_answers(evaluation: EvaluationReport) -> Iterator[str]:
    for number, answer in enumerate(evaluation.answers, 1):
        before = [token.text for token in answer.before]
        if _is_empty(answer.after) and not _is_empty(before):
            yield f"the answer to prompt {number} is empty, and the original's is not"
        elif _repeats_itself(answer.after) and not _repeats_itself(before):
            yield f"the answer to prompt {number} repeats itself, and the original's does not"


def _is_empty(tokens: Sequence[str]) -> bool:
    return not "".join(tokens).strip()


def _repeats_itself(tokens: Sequence[str]) -> bool:
    """Return whether the second half of an answer is the same few tokens again and again; a heuristic."""
    end = tokens[len(tokens) // 2 :]
    if len(tokens) < _LEAST_TOKENS or _is_empty(end):
        return False
    return any(end[period:] == end[:-period] for period in range(1, len(end) // _LEAST_REPETITIONS + 1))
