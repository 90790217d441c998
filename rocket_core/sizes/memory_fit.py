"""A memory with a context as a target: what was asked for, and how the memory is divided."""

from typing import Annotated, Literal

from pydantic import Field

from rocket_core.schema import FrozenModel

KvBits = Literal[4, 8, 16]
"""Bits of a key or a value, without its scales."""


class MemoryFit(FrozenModel):
    """The memory that weights, context and engine have to fit into."""

    memory_bytes: Annotated[int, Field(ge=1, lt=2**63)]
    """bytes of memory of the device that runs the result."""
    context: Annotated[int, Field(ge=1, lt=2**31)]
    """tokens of the longest sequence, prompt and answer together."""
    batch: Annotated[int, Field(ge=1, le=2**16)] = 1
    """sequences of that length that are in memory at the same time, 1 by default."""
    kv_bits: KvBits | None = None
    """bits of the keys and values that are kept: 16, 8 or 4, of those that the engine has; null (default) is what the
    engine does by itself: 16 bits, and with `transformers` the dtype of the model.
    """

    @property
    def tokens_text(self) -> str:
        """The tokens as people say them."""
        return f"{self.context:,} tokens" if self.batch == 1 else f"{self.batch:,} times {self.context:,} tokens"


class FittedMemory(MemoryFit):
    """How the memory is divided for a model and an engine."""

    cache_bytes: Annotated[int, Field(ge=0)]
    """bytes of the keys and values, latents and states of the context."""
    engine_bytes: Annotated[int, Field(ge=0)]
    """bytes that the engine is allowed in addition."""

    @property
    def weights_bytes(self) -> int:
        """What is left for the weights: the target size."""
        return self.memory_bytes - self.cache_bytes - self.engine_bytes

    def parts(self, engine: str, weights_bytes: int) -> tuple[tuple[str, int], ...]:
        """Return the rows of a table that shows the division, each with its bytes.

        Args:
            engine: the engine as people write it.
            weights_bytes: bytes of the weights.
        """
        total = weights_bytes + self.cache_bytes + self.engine_bytes
        return (
            ("weights", weights_bytes),
            (f"keys and values of {self.tokens_text}", self.cache_bytes),
            (f"allowance for {engine}", self.engine_bytes),
            ("total", total),
            ("asked for", self.memory_bytes),
        )
