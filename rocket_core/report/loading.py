"""What happened when an export was loaded by the engine that it is made for. Loads no torch."""

from datetime import date
from typing import Annotated

from pydantic import Field

from rocket_core.schema import FrozenModel

NOT_LOADED = "not loaded by its engine"
"""What is said of an export that no engine was there to load."""

MOST_DIVERGENCE = 0.1
"""Nats per token from which an engine computes something else than the weights of its file say.

An engine that rounds the inputs of layers to 8 bits, as llama.cpp does, is 0.0001 to 0.006 away for the models of the
tests, examples/tiny-llama and SmolLM2-135M, at 2 to 8 bits. A wrong rotation or scale costs nats.
"""


class LoadingReport(FrozenModel):
    """An export, loaded and run by an engine right after it was written.

    The engine continues a text greedily. The probabilities that it gives to the 16 likeliest tokens at each place, and
    to all others together, are compared with those that the weights of the export have in `transformers`.
    """

    engine: str
    """the engine, such as `llama.cpp`."""
    version: str | None
    """package that it came from, with its version; null if it is not installed."""
    date: date
    """the day, UTC."""
    untried: str | None = None
    """why it was not tried; null if it was."""
    fault: str | None = None
    """why it could not load or run the export; null if it did."""
    prompt_tokens: Annotated[int, Field(ge=0)] = 0
    """tokens that it read."""
    new_tokens: Annotated[int, Field(ge=0)] = 0
    """tokens that it generated."""
    text: str | None = None
    """what it generated."""
    kl_divergence: float | None = None
    """mean KL divergence of its predictions from those of the same weights in `transformers`, nats per token; null if
    they were not compared.
    """
    splits_alike: bool | None = None
    """whether it splits text into the same tokens as the original's tokenizer; null if that was not compared."""

    @property
    def anomaly(self) -> str | None:
        """What is wrong with the export or the engine, if anything is."""
        if self.fault is not None:
            return f"{self.engine} did not run it: {self.fault}"
        if self.kl_divergence is not None and self.kl_divergence > MOST_DIVERGENCE:
            return f"{self.engine} computes something else than the weights say: {self._difference}"
        if self.splits_alike is False:
            return f"{self.engine} splits text into other tokens than the original's tokenizer"
        return None

    @property
    def summary(self) -> str:
        """What happened, in a sentence."""
        if self.untried is not None:
            return f"{NOT_LOADED}: {self.untried}"
        where = f"{self.engine} ({self.version}) on {self.date.isoformat()}"
        if self.anomaly is not None:
            return f"{self.anomaly}; tried with {where}"
        if self.kl_divergence is None:
            return f"loaded and run by {where}"
        return f"loaded by {where}, {self.new_tokens} tokens generated, {self._difference}"

    @property
    def _difference(self) -> str:
        return f"KL divergence {self.kl_divergence:.2g} from its weights in transformers"
