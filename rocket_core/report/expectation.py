"""What a predicted increase of the loss means for perplexity, and how far such predictions held. Loads no torch."""

import math
from dataclasses import dataclass

from rocket_core.report.calibrated_text import CalibratedText

MEASURED_OF_PREDICTED = (0.5, 3.0)
"""The least and the most that measured increases of the loss were of predicted ones, but for `NOISE`, on the models of
docs/quality.md: `predictions.json` next to their plots, made by `python -m benchmarks.predictions`."""
NOISE = 0.0015
"""Nats per token by which they differed in addition: what a finite text decides."""

_MOST_NATS = 700.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """The perplexity to expect of a compressed model, by its predicted increase of the loss.

    Attributes:
        increase: predicted increase of the loss, in nats per token.
        before: perplexity of the original on the calibration text; None if unknown.
    """

    increase: float
    before: float | None = None

    @property
    def value(self) -> str:
        """The expected perplexity: `35.6 → 35.8`, or `0.3 % higher` if the original's is unknown."""
        if self.before is None:
            return f"{_percent(self.increase)} higher"
        return f"{self.before:.4g} → {self._after(self.increase):.4g}"

    @property
    def range_text(self) -> str:
        """The range of perplexities within which measured ones were, as text."""
        low, high = self.bounds
        if self.before is None:
            return f"{_percent(low)} to {_percent(high)} higher"
        return f"{self._after(low):.4g} to {self._after(high):.4g}"

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest increase of the loss to expect, in nats per token."""
        low, high = MEASURED_OF_PREDICTED
        return low * self.increase - NOISE, high * self.increase + NOISE

    @property
    def explanation(self) -> str:
        """How the value is to be read."""
        low, high = MEASURED_OF_PREDICTED
        return (
            f"expected perplexity, probably {self.range_text}: predicted from the calibration text, not measured; "
            f"measured increases of the loss were {low:g} to {high:g} times the predicted ones. Ask for an evaluation "
            "to measure it"
        )

    def _after(self, increase: float) -> float:
        assert self.before is not None
        return self.before * math.exp(min(increase, _MOST_NATS))


def expectation(increase: float, text: CalibratedText | None) -> Expectation:
    """Return what to expect of a model with a predicted increase of the loss.

    Args:
        increase: predicted increase of the loss, in nats per token.
        text: the original's predictions of the calibration text, if they were measured.
    """
    return Expectation(increase=increase, before=None if text is None else text.perplexity)


def _percent(nats: float) -> str:
    return f"{100 * math.expm1(min(nats, _MOST_NATS)):.2g} %"
