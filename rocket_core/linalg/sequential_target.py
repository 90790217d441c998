"""Targets of layers whose inputs deviate from the dense model's, because the layers before them are compressed."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.linalg.whitening import shrunk_gram


def token_weights(outputs: Float[Tensor, "rows d_out"], usual: Float[Tensor, ""] | float) -> Float[Tensor, " rows"]:
    """Return how much the error of each token counts: 1 / (1 + ‖y‖² / m), y its output and m a usual ‖y‖².

    In many models one token of each window, mostly the first, has outputs some hundred times as large as those of the
    others. The norm that follows removes their size, so that errors of that token matter relative to it; counted as
    they are, they would determine what all other tokens get.

    Args:
        outputs: Y.
        usual: m; may be 0 if all outputs are.
    """
    energy = torch.as_tensor(usual).to(outputs).clamp_min(torch.finfo(outputs.dtype).tiny)
    return energy / (energy + outputs.square().sum(dim=1))


def compensation(
    gram: Float[Tensor, "d_in d_in"],
    missing: Float[Tensor, "d_in d_out"],
    *,
    tokens: float | int,
    shrinkage: float,
) -> Float[Tensor, "d_in d_out"]:
    """Return the change of a weight that brings the compressed model closest to wanted outputs Y.

    That is D with the least ‖Y - X'(W + D)‖² + a·Σ_i G'_ii ‖d_i‖², where G' = X'ᵀX' and a is the strength of the
    shrinkage: if the tokens are too few to determine it, it stays small. With weighted tokens, X' and Y are multiplied
    by the roots of their weights. Y is the dense model's output XW, or what has to be added to the residual stream of
    the compressed model to give that of the dense one.

    Args:
        gram: G'.
        missing: X'ᵀ(Y - X'W), in float64.
        tokens: rows of X, or as many as count.
        shrinkage: pull towards the diagonal, [0, 1].

    Returns:
        D, in float64.
    """
    shrunk = shrunk_gram(gram, tokens, shrinkage)
    mean = shrunk.diagonal().mean()
    # Inputs that never fire leave a zero on the diagonal; their weights are unchanged.
    floor = torch.where(shrunk.diagonal() > 0, 1e-10 * mean, torch.where(mean > 0, mean, 1.0))
    # In place: such matrices are the largest that a run holds.
    shrunk.diagonal().add_(floor)
    change: Tensor = torch.linalg.solve(shrunk, missing)
    return change


def least_squares_step(changes: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Float[Tensor, ""]:
    """Return the part of changes D that errs least on tokens, Σ ⟨D, M⟩ / Σ ⟨D, G'D⟩; 0 if they change nothing there.

    Args:
        changes: D, the Gram matrix G' of the tokens, and what is missing on them, X'ᵀ(Y - X'W); at least one.
    """
    parts = list(changes)
    along = torch.stack([(change * missing).sum() for change, _, missing in parts]).sum()
    energy = torch.stack([(change * (gram @ change)).sum() for change, gram, _ in parts]).sum()
    return torch.where(energy > 0, along / energy, 0.0)
