"""Whitening: the eigenbasis of the whitened weight from calibration statistics (paper, section 3, equations 1-3).

Symbols: W weight, G Gram matrix XᵀX of the layer's input X, S whitening factor with SᵀS = G, SW = B Σ Vᵀ. Only Σ and V
are ever needed: the stored dictionary is W Cᵀ(CCᵀ)⁻¹, in which S cancels.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.errors import IllConditionedGramError

# Lower bound on the spectrum of a Gram matrix, relative to its mean diagonal: far below what calibration can resolve,
# far above float64 rounding. With it the Cholesky factorization succeeds for inputs that never fire (all-zero columns
# of X).
_DAMPING = 1e-10
WEIGHTED_SHRINKAGE = 0.5
"""Strength for weighted tokens: SmolLM2 at 4.25 bits has a KL of 0.107, 0.105 and 0.105 with 0.5, 1.5 and 5 d / tokens,
of which half count or fewer.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Eigenbasis:
    """Right singular vectors and singular values of the whitened weight, by decreasing singular value.

    Attributes:
        directions: V, (d_out, m) with m = min(d_in, d_out); columns are orthonormal if their singular values are
            above rounding.
        singular_values: Σ, >= 0, (m,).
    """

    directions: Float[Tensor, "d_out m"]
    singular_values: Float[Tensor, " m"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GramStatistics:
    """The calibration statistics of a layer.

    Attributes:
        tokens: rows of X that were summed.
        gram: G = XᵀX; None if the output's Gram matrix is smaller.
        output_gram: WᵀGW; None if G is given.
        input_energy: diagonal of G.
        routed: for an expert of a mixture, the tokens that were routed to it, the others being an average of its
            block's; None for other layers.
        held_out: rows of X after those that were summed, on which losses are estimated; None if all were summed.
    """

    tokens: int
    gram: Float[Tensor, "d_in d_in"] | None
    output_gram: Float[Tensor, "d_out d_out"] | None
    input_energy: Float[Tensor, " d_in"]
    routed: int | None = None
    held_out: Float[Tensor, "held d_in"] | None = None

    def output_energies(self, weight: Float[Tensor, "d_in d_out"]) -> Float[Tensor, " d_out"]:
        """Return the diagonal of WᵀGW: the squared norm of each output over the calibration tokens.

        Args:
            weight: W, in float64.
        """
        if self.output_gram is not None:
            return self.output_gram.diagonal()
        assert self.gram is not None
        return (weight * (self.gram @ weight)).sum(dim=0)


def basis_from_statistics(
    weight: Float[Tensor, "d_in d_out"], statistics: GramStatistics, *, shrinkage: float
) -> Eigenbasis:
    """Compute the eigenbasis of the whitened weight, in float64.

    Args:
        weight: W, in any floating dtype.
        statistics: calibration statistics of this layer.
        shrinkage: strength of the shrinkage of the Gram matrix towards its diagonal, [0, 1].

    Returns:
        The basis, on the device of `weight`.

    Raises:
        IllConditionedGramError: the Gram matrix cannot be factorized.
    """
    weight = weight.double()
    if statistics.gram is not None:
        return eigenbasis(weight, shrunk_gram(statistics.gram.double(), statistics.tokens, shrinkage))
    assert statistics.output_gram is not None
    energy = statistics.input_energy.double()
    return eigenbasis_of_output_gram(
        shrunk_output_gram(statistics.output_gram.double(), weight, energy, statistics.tokens, shrinkage)
    )


def shrunk_gram(gram: Float[Tensor, "d d"], tokens: float | int, shrinkage: float) -> Float[Tensor, "d d"]:
    """Shrink a Gram matrix of few tokens towards its diagonal: G + a·diag(G), a = shrinkage · d / tokens.

    With tokens = d / 4 this lowered the held-out error from 0.081 (eigenvalue shift) to 0.059 on one layer; with many
    tokens the shrinkage vanishes.

    Args:
        gram: XᵀX summed over tokens, symmetric.
        tokens: rows of X, or as many as count, > 0.
        shrinkage: strength, [0, 1]; 0.02-0.1 is sensible.

    Returns:
        A new matrix on the device of `gram`.
    """
    shrunk = gram.clone()
    shrunk.diagonal().mul_(1 + shrinkage * gram.shape[0] / tokens)
    return shrunk


def shrunk_for_weights(gram: Float[Tensor, "d d"], weights: Float[Tensor, " tokens"]) -> Float[Tensor, "d d"]:
    """Shrink a Gram matrix of weighted tokens towards its diagonal: G + a·diag(G), a = d / (2 tokens that count).

    Few tokens have most of the weight, and more of them are needed than the weights of a layer have inputs. As many as
    (Σw)² / Σw² count, at least one. On SmolLM2 at 4.25 bits, 16,384 tokens, KL on other text falls from 0.112 to 0.105.

    Args:
        gram: sum of w x xᵀ over tokens, symmetric.
        weights: w, >= 0.

    Returns:
        A new matrix on the device of `gram`.
    """
    return shrunk_gram(gram, tokens_that_count(weights), WEIGHTED_SHRINKAGE)


def tokens_that_count(weights: Float[Tensor, " tokens"]) -> float:
    """Return as how many tokens of equal weight weighted ones count: (Σw)² / Σw², at least 1."""
    squares = weights.square().sum().clamp_min(torch.finfo(weights.dtype).tiny)
    return max(1.0, float(weights.sum() ** 2 / squares))


def shrunk_output_gram(
    output_gram: Float[Tensor, "d_out d_out"],
    weight: Float[Tensor, "d_in d_out"],
    input_energy: Float[Tensor, " d_in"],
    tokens: int,
    shrinkage: float,
) -> Float[Tensor, "d_out d_out"]:
    """Apply the same shrinkage on the output side: Wᵀ(G + a·diag(G))W, from WᵀGW and the diagonal of G alone.

    Args:
        output_gram: WᵀGW, the Gram matrix of the layer's output without bias.
        weight: W.
        input_energy: diagonal of G, the sum of squares of each input feature.
        tokens: rows of X, >= 1.
        shrinkage: strength, [0, 1].

    Returns:
        A new matrix on the device of `output_gram`.
    """
    strength = shrinkage * weight.shape[0] / tokens
    return output_gram + strength * (weight.mT @ (input_energy[:, None] * weight))


def whitening_factor(gram: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """Compute the upper-triangular S with SᵀS = G + 1e-10·mean(diag G)·I.

    Args:
        gram: symmetric positive semi-definite matrix.

    Returns:
        S on the device of `gram`.

    Raises:
        IllConditionedGramError: the matrix is not positive semi-definite, or all zero.
    """
    damped = gram.clone()
    damped.diagonal().add_(_DAMPING * gram.diagonal().mean())
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(damped, upper=True)
    if int(info) != 0:
        raise IllConditionedGramError(
            f"a Gram matrix of size {gram.shape[0]} cannot be factorized (leading minor {int(info)} is not positive); "
            "calibrate with more samples, or raise the shrinkage setting"
        )
    return factor


def eigenbasis(weight: Float[Tensor, "d_in d_out"], gram: Float[Tensor, "d_in d_in"]) -> Eigenbasis:
    """Compute singular values and right singular vectors of S W, by an eigendecomposition on the smaller side.

    The result equals `torch.linalg.svd(S @ W)` up to signs, 2-9 times faster. If d_out <= d_in no factor of G is
    needed: V and Σ² are the eigenpairs of WᵀGW.

    Args:
        weight: W.
        gram: G, already shrunk.

    Returns:
        The basis, in the dtype and on the device of `weight`.

    Raises:
        IllConditionedGramError: d_out > d_in and G cannot be factorized.

    References:
        ROCKET, section 3: eigendecomposition of W_L W_Lᵀ.
    """
    d_in, d_out = weight.shape
    if d_out <= d_in:
        return eigenbasis_of_output_gram(weight.mT @ gram @ weight)
    whitened = whitening_factor(gram) @ weight
    energies, left = torch.linalg.eigh(whitened @ whitened.mT)
    singular_values = energies.flip(0).clamp_min(0).sqrt()
    projected = whitened.mT @ left.flip(1)
    # A direction without energy has no unique right singular vector; zero removes it from every product.
    scale = torch.where(singular_values > 0, singular_values, torch.inf)
    return Eigenbasis(directions=projected / scale, singular_values=singular_values)


def eigenbasis_of_output_gram(output_gram: Float[Tensor, "d_out d_out"]) -> Eigenbasis:
    """Compute the basis from WᵀGW alone, for layers with d_out <= d_in.

    Args:
        output_gram: WᵀGW, already shrunk.

    Returns:
        The basis, on the device of `output_gram`.
    """
    energies, directions = torch.linalg.eigh((output_gram + output_gram.mT) / 2)
    return Eigenbasis(directions=directions.flip(1), singular_values=energies.flip(0).clamp_min(0).sqrt())
