"""A transformers model, seen as a sequence of blocks."""
