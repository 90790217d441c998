"""What a predicted increase of the loss means for perplexity, and how far such predictions held. Loads no torch."""

import math
from dataclasses import dataclass

from rocket_core.report.calibrated_text import CalibratedText

FIRST_ORDER = {False: 0.9, True: 0.65}
"""Small measured increases of the loss divided by predicted ones, by whether layers were compressed one after another
(`sequential`), which makes up for a part of what profiles predict.
"""
GROWTH = 3.3
"""By how much more large losses grow than predicted ones, per nat: `measured = first · p · (1 + growth · p)`.

Both were fitted to the models of docs/quality-details.md: `predictions.json` next to their plots, made by
`python -m benchmarks.predictions`. Bits and kinds of layers made a difference of less than a fifth.
"""
WITHIN = 1.5
"""Factor within which nine of ten measured increases were of the fit, but for `NOISE`."""
WITHIN_IF_KNOWN_BY_HEART = 5.0
"""By how much more they were where the calibration text is one that the model has learnt by heart."""
NOISE = 0.0015
"""Nats per token by which they differed in addition: what a finite text decides."""

_MOST_NATS = 700.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """The perplexity to expect of a compressed model, by its predicted increase of the loss.

    Attributes:
        increase: expected increase of the loss, in nats per token.
        before: perplexity of the original on the calibration text; None if unknown.
        known_by_heart: whether the model has learnt that text by heart.
    """

    increase: float
    before: float | None = None
    known_by_heart: bool = False

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
        high = WITHIN_IF_KNOWN_BY_HEART if self.known_by_heart else WITHIN
        return self.increase / WITHIN - NOISE, high * self.increase + NOISE

    @property
    def explanation(self) -> str:
        """How the value is to be read."""
        why = f"nine of ten measured increases of the loss were within a factor of {WITHIN:g}"
        if self.known_by_heart:
            why = "the model has learnt this text by heart, and other text loses up to five times as much"
        return (
            f"expected perplexity, probably {self.range_text}: predicted from the calibration text, not measured; "
            f"{why}. Ask for an evaluation to measure it"
        )

    def _after(self, increase: float) -> float:
        assert self.before is not None
        return self.before * math.exp(min(increase, _MOST_NATS))


def expectation(predicted: float, text: CalibratedText | None, *, sequential: bool = False) -> Expectation:
    """Return what to expect of a model.

    Args:
        predicted: predicted increase of the loss, in nats per token.
        text: the original's predictions of the calibration text, if they were measured.
        sequential: whether layers were compressed one after another.
    """
    return Expectation(
        increase=FIRST_ORDER[sequential] * predicted * (1 + GROWTH * predicted),
        before=None if text is None else text.perplexity,
        known_by_heart=text is not None and text.is_known_by_heart,
    )


def _percent(nats: float) -> str:
    return f"{100 * math.expm1(min(nats, _MOST_NATS)):.2g} %"
