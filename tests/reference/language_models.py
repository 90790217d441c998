"""Language models whose predictions are known, and slow predictions token by token."""

import math
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from tests.reference.tiny_models import VOCAB_SIZE


class FixedLogits(nn.Module):
    """A model whose logits depend only on the last token."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)
        self.eval()

    def forward(self, *, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        assert not use_cache
        return SimpleNamespace(logits=self.table[input_ids])


def random_tokens(count: int, vocabulary: int = VOCAB_SIZE, seed: int = 1) -> Tensor:
    """Return a stream of token ids."""
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed))


def random_windows(count: int, length: int, vocabulary: int = VOCAB_SIZE) -> Tensor:
    """Return windows that do not overlap."""
    return random_tokens(count * length, vocabulary).reshape(count, length)


def next_logits(model: nn.Module, prefix: list[int]) -> list[float]:
    """Return the model's logits for the token after a prefix, computed from scratch."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([prefix]), use_cache=False).logits[0, -1]
    return [float(value) for value in logits]


def surprise_of(logits: list[float], token: int) -> float:
    """Return -log softmax(logits)[token], with Python's own arithmetic."""
    return log_sum_exp(logits) - logits[token]


def log_sum_exp(values: list[float]) -> float:
    """Return log Σ exp(values), computed relative to the largest."""
    largest = max(values)
    return largest + math.log(math.fsum(math.exp(value - largest) for value in values))


def divergence_of(dense: list[float], compressed: list[float]) -> float:
    """Return the KL divergence of two softmaxes, term by term."""
    one, other = log_sum_exp(dense), log_sum_exp(compressed)
    return math.fsum(
        math.exp(left - one) * ((left - one) - (right - other)) for left, right in zip(dense, compressed, strict=True)
    )
