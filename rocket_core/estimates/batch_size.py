"""Positions that a model computes at once."""

# Enough tokens in one batch to keep matrix products busy; more would only take memory.
TOKENS_PER_BATCH = 8192
# Elementwise operations are faster while their operands fit into a processor's cache.
TOKENS_PER_BATCH_ON_CPU = 2048


def tokens_per_batch(device: str) -> int:
    """Return the most positions of a batch on a type of device."""
    return TOKENS_PER_BATCH_ON_CPU if device.startswith("cpu") else TOKENS_PER_BATCH
