"""Divergence of token distributions."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

# Memory for two distributions and their difference, in float64, during a comparison.
_CHUNK_BYTES = 192 * 2**20
_TENSORS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceSum:
    """The divergence summed over some tokens; sums can be added.

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
    """Compute the Kullback-Leibler divergence of a compressed model's next-token distributions from the dense model's.

    Computes Σᵢ Σᵥ pᵢᵥ (log pᵢᵥ - log qᵢᵥ), p = softmax(dense), q = softmax(compressed), in float64. For equal logits it
    is exactly 0. If several tokens share the maximum, the first of them counts as the most likely.

    Args:
        dense: finite logits of the dense model.
        compressed: finite logits of the compressed model for the same tokens, on the same device.
        chunk_bytes: upper bound on the float64 copies of a chunk of tokens; a chunk has at least one token.

    Returns:
        Sums over the tokens.
    """
    tokens, vocabulary = dense.shape
    size = max(1, chunk_bytes // (_TENSORS * 8 * vocabulary))
    total = DivergenceSum(kl_divergence=0.0, agreements=0, tokens=tokens)
    for left, right in zip(torch.split(dense, size), torch.split(compressed, size), strict=True):
        divergence = divergence_per_token(left, right).sum()
        agreements = int((left.argmax(-1) == right.argmax(-1)).sum())
        total += DivergenceSum(kl_divergence=float(divergence), agreements=agreements, tokens=0)
    return total


def divergence_per_token(
    dense: Float[Tensor, "tokens vocabulary"], compressed: Float[Tensor, "tokens vocabulary"]
) -> Float64[Tensor, " tokens"]:
    """Compute Σᵥ pᵢᵥ (log pᵢᵥ - log qᵢᵥ) of each token i, p = softmax(dense), q = softmax(compressed), in float64."""
    log_p = dense.double().log_softmax(-1)
    difference = log_p - compressed.double().log_softmax(-1)
    return log_p.exp_().mul_(difference).sum(-1)
