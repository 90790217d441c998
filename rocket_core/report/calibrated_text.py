"""How well the original predicts its calibration text. Loads no torch."""

import math
from typing import Annotated

from pydantic import Field

from rocket_core.schema import FrozenModel

MOST_SURPRISE = 1.0
"""Nats per token by which a text may be less likely than the model itself expects.

A text like those that a model was trained on is about as likely as it expects: 0.1 to 0.2 nats less for stories260K on
stories, 0.5 for examples/tiny-llama on parts of CPython's documentation that it was not trained on. Other texts (other
prose, plays, the documentation, random letters) are less likely than these two models expect by 2.1 nats or more.
"""

LEAST_SURPRISE = -0.1
"""Nats per token below which a model has learnt the text itself, and not only what it is like.

examples/tiny-llama finds CPython's documentation, on which it was trained, 0.2 to 0.3 nats more likely than it expects,
and held-out parts of it 0.5 nats less; stories260K finds its training stories, of which there are many, 0.1 to 0.2 nats
less likely.
"""


class CalibratedText(FrozenModel):
    """The original's predictions of its calibration text, on the windows on which sensitivities were measured."""

    tokens: Annotated[int, Field(ge=1)]
    """predicted tokens."""
    negative_log_likelihood: Annotated[float, Field(ge=0)]
    """mean over the predicted tokens, in nats."""
    entropy: Annotated[float, Field(ge=0)]
    """mean entropy of the predicted distributions, in nats: the negative log-likelihood that the model expects."""

    @property
    def perplexity(self) -> float:
        """The original's perplexity on the text."""
        return math.exp(min(self.negative_log_likelihood, 709.0))

    @property
    def own_perplexity(self) -> float:
        """The perplexity that the model itself expects."""
        return math.exp(min(self.entropy, 709.0))

    @property
    def surprise(self) -> float:
        """By how many nats per token the text is less likely than the model itself expects."""
        return self.negative_log_likelihood - self.entropy

    @property
    def is_foreign(self) -> bool:
        """Whether the text is far from what the model was trained on, so that statistics of it mislead."""
        return self.surprise > MOST_SURPRISE

    @property
    def is_known_by_heart(self) -> bool:
        """Whether the model was trained on this very text, so that other text loses more than it does."""
        return self.surprise < LEAST_SURPRISE

    @property
    def warning(self) -> str | None:
        """What is wrong with calibrating on the text, and what to do; None if nothing is."""
        if not self.is_foreign:
            return None
        return (
            "the calibration text is unlike what the model was trained on: its perplexity is "
            f"{self.perplexity:.3g}, where the model itself expects {self.own_perplexity:.3g}. The result may lose far "
            "more than it has to; calibrate on text that the model will read"
        )
