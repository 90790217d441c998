"""How far one distribution over tokens is from another."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

# Of two distributions and their difference in float64, while they are compared.
_CHUNK_BYTES = 192 * 2**20
_TENSORS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceSum:
    """Divergence of some tokens, to be added up.

    Attributes:
        kl_divergence: sum over the tokens of Σ p log(p/q), in nats.
        agreements: tokens for which both distributions have the same maximum.
        tokens: number of tokens.
    """

    kl_divergence: float
    agreements: int
    tokens: int

    def __add__(self, other: "DivergenceSum") -> "DivergenceSum":
        return DivergenceSum(
            kl_divergence=self.kl_divergence + other.kl_divergence,
            agreements=self.agreements + other.agreements,
            tokens=self.tokens + other.tokens,
        )


def token_divergence(
    dense: Float[Tensor, "tokens vocabulary"],
    compressed: Float[Tensor, "tokens vocabulary"],
    *,
    chunk_bytes: int = _CHUNK_BYTES,
) -> DivergenceSum:
    """Kullback-Leibler divergence of a compressed model's next-token distributions from the dense model's.

    Computes Σᵢ Σᵥ pᵢᵥ (log pᵢᵥ - log qᵢᵥ), p = softmax(dense), q = softmax(compressed), in float64. Of equal logits it
    is exactly 0. Where several tokens share the maximum, the first of them is the likeliest.

    Args:
        dense: finite logits of the dense model.
        compressed: finite logits of the compressed one for the same tokens, on the same device.
        chunk_bytes: tokens are taken in chunks whose float64 copies stay within this size, but for one token at least.

    Returns:
        Sums over the tokens.
    """
    tokens, vocabulary = dense.shape
    size = max(1, chunk_bytes // (_TENSORS * 8 * vocabulary))
    total = DivergenceSum(kl_divergence=0.0, agreements=0, tokens=tokens)
    for left, right in zip(torch.split(dense, size), torch.split(compressed, size), strict=True):
        log_p = left.double().log_softmax(-1)
        difference = log_p - right.double().log_softmax(-1)
        divergence = log_p.exp_().mul_(difference).sum()
        agreements = int((left.argmax(-1) == right.argmax(-1)).sum())
        total += DivergenceSum(kl_divergence=float(divergence), agreements=agreements, tokens=0)
    return total
