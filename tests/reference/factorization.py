"""The paper's formulas for a layer in float64: slow, explicit, independent of the library."""

import torch

PAPER_RATIOS = [round(0.05 * step, 2) for step in range(1, 15)]
PAPER_RANK_NNZ_RATIOS = [round(1 + 0.1 * step, 1) for step in range(21)]


def whiten(weight, gram):
    """Return upper-triangular L with LᵀL = gram, its inverse, and the whitened weight."""
    factor = torch.linalg.cholesky(gram).T
    return factor, torch.linalg.inv(factor), factor @ weight


def importance(weight, gram, balance):
    """|C| ⊙ (ν 1ᵀ) with ν_i = ‖L⁻¹ b_i‖^λ, C = BᵀW_L, B the eigenvectors of W_L W_Lᵀ."""
    _, inverse, whitened = whiten(weight, gram)
    basis, _, _ = torch.linalg.svd(whitened, full_matrices=False)
    coefficients = basis.T @ whitened
    lengths = torch.stack([torch.linalg.norm(inverse @ basis[:, i]) for i in range(basis.shape[1])])
    return coefficients, coefficients.abs() * lengths[:, None] ** balance


def support(scores, nnz, beta):
    """Top s per column, then the globally best of the rest up to exactly nnz, one coefficient at a time."""
    rank, d_out = scores.shape
    per_column = max(0, int(nnz / d_out - beta * rank))
    kept = set()
    for j in range(d_out):
        order = sorted(range(rank), key=lambda i: (-float(scores[i, j]), i))
        kept |= {(i, j) for i in order[:per_column]}
    rest = [(i, j) for i in range(rank) for j in range(d_out) if (i, j) not in kept]
    rest.sort(key=lambda ij: -float(scores[ij]))
    kept |= set(rest[: nnz - len(kept)])
    mask = torch.zeros(rank, d_out, dtype=torch.bool)
    for i, j in kept:
        mask[i, j] = True
    return mask


def fast_support(scores, nnz, beta):
    """Apply the same rule with tensor operations, for layers too large to loop over."""
    rank, d_out = scores.shape
    per_column = max(0, int(nnz / d_out - beta * rank))
    mask = torch.zeros(rank, d_out, dtype=torch.bool)
    if per_column >= rank:
        return torch.ones_like(mask)
    if per_column:
        threshold = torch.kthvalue(scores, rank - per_column, dim=0).values
        mask = scores > threshold[None]
    missing = nnz - int(mask.sum())
    if missing > 0:
        rest = (scores * ~mask).flatten()
        threshold = torch.kthvalue(rest, rest.numel() - missing).values
        mask = mask | (~mask & (scores > threshold))
    return mask


def least_squares(whitened, coefficients):
    """argmin_D ‖W_L - D C‖, column by column of the transposed problem."""
    return torch.linalg.lstsq(coefficients.T, whitened.T, driver="gelsd").solution.T


def factorize(weight, gram, rank, nnz, *, balance=0.5, beta=5e-3):
    """Return the approximation W̃ = L⁻¹ D C and its two relative errors, by explicit reconstruction."""
    factor, inverse, whitened = whiten(weight, gram)
    coefficients, scores = importance(weight, gram, balance)
    sparse = coefficients[:rank] * support(scores[:rank], nnz, beta)
    approximation = inverse @ least_squares(whitened, sparse) @ sparse
    return approximation, *errors(weight, factor, approximation)


def errors(weight, factor, approximation):
    """Return the relative error in the original and in the whitened space."""
    difference = weight - approximation
    return (
        float(torch.linalg.norm(difference) / torch.linalg.norm(weight)),
        float(torch.linalg.norm(factor @ difference) / torch.linalg.norm(factor @ weight)),
    )


def profile(weight, gram, shapes, *, balance=0.5, beta=5e-3, ridge=1e-8):
    """Return both errors of every shape, each with explicit mask, dictionary and reconstruction, as in the paper."""
    factor, inverse, whitened = whiten(weight, gram)
    basis, _, _ = torch.linalg.svd(whitened, full_matrices=False)
    coefficients = basis.T @ whitened
    lengths = torch.linalg.norm(inverse @ basis, dim=0)
    scores = coefficients.abs() * lengths[:, None] ** balance
    table = {}
    for rank, nnz in shapes:
        sparse = coefficients[:rank] * fast_support(scores[:rank], nnz, beta)
        system = sparse @ sparse.T
        system = system + torch.diag(ridge * system.diagonal().clamp_min(1e-300))
        dictionary = torch.cholesky_solve(sparse @ whitened.T, torch.linalg.cholesky(system)).T
        table[rank, nnz] = errors(weight, factor, inverse @ dictionary @ sparse)
    return table
