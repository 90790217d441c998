"""Embeddings of transformers that multiply what they look up by a constant, as Gemma's and BART's do."""

from typing import Any

import torch
from torch import nn


def embedding_scale(embedding: nn.Module) -> float | None:
    """Return the constant that an embedding multiplies its rows by; None if it computes anything else.

    Args:
        embedding: a module of any class, possibly on the meta device.
    """
    # A largest norm changes the table while it is used.
    if not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        return None
    if type(embedding) is nn.Embedding:
        return 1.0
    scale = getattr(embedding, "scalar_embed_scale", getattr(embedding, "embed_scale", None))
    return float(scale) if isinstance(scale, int | float) and rounds_scale(type(embedding)) is not None else None


def stock_embedding(embedding_class: type[nn.Embedding], columns: int, scale: float) -> nn.Embedding:
    """Return an embedding of one row whose buffers have their values.

    Args:
        embedding_class: `nn.Embedding` or a class that only scales.
        columns: numbers of a row.
        scale: what rows are multiplied by; 1 for `nn.Embedding`.
    """
    if embedding_class is nn.Embedding:
        return nn.Embedding(1, columns)
    scaled: Any = embedding_class
    made: nn.Embedding = scaled(1, columns, None, embed_scale=scale)
    return made


def rounds_scale(embedding_class: type[nn.Embedding]) -> bool | None:
    """Return whether embeddings of a class round the scale to the dtype of the rows before they compute `rows * scale`.

    Args:
        embedding_class: `nn.Embedding` or any class derived from it.

    Returns:
        None if they compute anything else.
    """
    try:
        # transformers may be building a model on the meta device.
        with torch.device("cpu"), torch.no_grad():
            tried = stock_embedding(embedding_class, 65, 1.1).to(torch.bfloat16)
            rows = tried.weight.copy_(torch.linspace(-2, 2, 65))
            found = tried(torch.zeros(3, dtype=torch.int64))
            scales: dict[bool, torch.Tensor | float] = {True: torch.tensor(1.1, dtype=torch.bfloat16), False: 1.1}
            return next(
                (key for key, scale in scales.items() if torch.equal(found, (rows * scale).expand(3, -1))), None
            )
    except (TypeError, AttributeError, RuntimeError, ValueError, IndexError):
        return None
