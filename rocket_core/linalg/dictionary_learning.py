"""Dictionary learning: K-SVD with orthogonal matching pursuit.

Pure functions of tensors. Dictionary and coefficients, with equally many nonzeros in every column, are optimised
jointly by many small steps, as the problem has no closed-form solution.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# Columns are processed in chunks whose numbers fit a cache, but of at least `_LEAST_COLUMNS`.
_NUMBERS_AT_ONCE = 2**19
_LEAST_COLUMNS = 64
# An iteration with a smaller gain, relative to the error, is the last.
_LEAST_GAIN = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedDictionary:
    """The result of K-SVD.

    Attributes:
        atoms: A, columns of unit length.
        coefficients: X, zero outside the support.
        support: equally many entries in every column.
        errors: ‖Y - AX‖² at the start and after each iteration; never rising.
    """

    atoms: Float[Tensor, "rows rank"]
    coefficients: Float[Tensor, "rank columns"]
    support: Bool[Tensor, "rank columns"]
    errors: tuple[float, ...]


def learn_dictionary(
    targets: Float[Tensor, "rows columns"],
    start: Float[Tensor, "rows rank"],
    nonzeros: int,
    *,
    iterations: int,
) -> LearnedDictionary:
    """Minimise ‖Y - AX‖² over unit atoms A and coefficients X with `nonzeros` nonzeros in every column.

    Each iteration improves the atoms one after another, together with the coefficients that use them, by a step of the
    power method on the residual without the atom (approximately its leading singular pair), and then repeats the
    pursuit for each column. A column keeps its coefficients if the pursuit finds none better, so no iteration increases
    the error. Unused atoms are replaced by the columns with the largest residuals. Ends early once an iteration gains
    almost nothing.

    Costs about `nonzeros² · rank · columns` per iteration: minutes for matrices of a thousand rows and columns.

    Args:
        targets: Y.
        start: initial atoms, of unit length.
        nonzeros: nonzeros of each column, 1 to the number of atoms.
        iterations: maximum number of iterations, >= 0.

    Returns:
        The result, deterministic, in the dtype and on the device of the targets.

    References:
        Aharon et al., "K-SVD", 2006; Rubinstein et al., "Efficient implementation of the K-SVD algorithm using batch
        orthogonal matching pursuit", 2008.
    """
    atoms = start.clone()
    coefficients, support = orthogonal_matching_pursuit(atoms, targets, nonzeros)
    residual = targets - atoms @ coefficients
    errors = [_energy(residual)]
    for _ in range(iterations):
        _improve_atoms(atoms, coefficients, support, residual)
        residual = targets - atoms @ coefficients
        pursued, places = orthogonal_matching_pursuit(atoms, targets, nonzeros)
        left = targets - atoms @ pursued
        better = left.square().sum(dim=0) < residual.square().sum(dim=0)
        coefficients = torch.where(better, pursued, coefficients)
        support = torch.where(better, places, support)
        residual = torch.where(better, left, residual)
        errors.append(_energy(residual))
        if errors[-2] - errors[-1] <= _LEAST_GAIN * errors[-2]:
            break
    return LearnedDictionary(atoms=atoms, coefficients=coefficients, support=support, errors=tuple(errors))


def orthogonal_matching_pursuit(
    atoms: Float[Tensor, "rows rank"], targets: Float[Tensor, "rows columns"], nonzeros: int
) -> tuple[Float[Tensor, "rank columns"], Bool[Tensor, "rank columns"]]:
    """Choose `nonzeros` coefficients of every column, greedily by the atom that correlates most with the residual.

    After each choice the coefficients chosen so far are the exact least-squares solution. All columns are processed at
    once: chosen atoms are orthogonalised one by one, and only their products with all atoms are stored.

    Args:
        atoms: A, columns of unit length or zero.
        targets: Y.
        nonzeros: nonzeros of each column, 1 to the number of atoms.

    Returns:
        X and its support. Atoms that add nothing (the residual is zero, or they depend on chosen ones) are in the
        support with a coefficient of zero.

    References:
        Pati et al., "Orthogonal matching pursuit", 1993.
    """
    gram = atoms.mT @ atoms
    correlations = targets.mT @ atoms
    chunk = max(_LEAST_COLUMNS, _NUMBERS_AT_ONCE // (nonzeros * atoms.shape[1]))
    parts = [_pursue(gram, part, nonzeros) for part in torch.split(correlations, chunk)]
    coefficients = torch.cat([part[0] for part in parts]).mT
    support = torch.cat([part[1] for part in parts]).mT
    return coefficients, support


def _pursue(
    gram: Float[Tensor, "rank rank"], correlations: Float[Tensor, "columns rank"], nonzeros: int
) -> tuple[Float[Tensor, "columns rank"], Bool[Tensor, "columns rank"]]:
    columns, rank = correlations.shape
    support = torch.zeros(columns, rank, dtype=torch.bool, device=gram.device)
    chosen = torch.empty(columns, nonzeros, dtype=torch.long, device=gram.device)
    # With Q the orthonormal basis of the chosen atoms A_I = QR: QᵀA, R and Qᵀy of each column.
    products = gram.new_empty(columns, nonzeros, rank)
    triangle = gram.new_zeros(columns, nonzeros, nonzeros)
    lengths = gram.new_empty(columns, nonzeros)
    least = 32 * torch.finfo(gram.dtype).eps
    for step in range(nonzeros):
        atom = correlations.abs().masked_fill(support, -1).argmax(dim=1, keepdim=True)
        support.scatter_(1, atom, value=True)
        chosen[:, step] = atom[:, 0]
        earlier = products[:, :step]
        parts = earlier.gather(2, atom[:, None].expand(-1, step, 1))
        row = gram[atom[:, 0]] - (parts.mT @ earlier)[:, 0]
        norm = row.gather(1, atom).clamp_min(0).sqrt()
        independent = norm > least**0.5
        row = torch.where(independent, row / norm, 0)
        length = torch.where(independent, correlations.gather(1, atom) / norm, 0)
        products[:, step] = row
        lengths[:, step] = length[:, 0]
        triangle[:, :step, step] = parts[:, :, 0]
        triangle[:, step, step] = torch.where(independent, norm, 1)[:, 0]
        correlations = correlations - length * row
    values = torch.linalg.solve_triangular(triangle, lengths[:, :, None], upper=True)[:, :, 0]
    return torch.zeros_like(correlations).scatter(1, chosen, values), support


def _improve_atoms(
    atoms: Float[Tensor, "rows rank"],
    coefficients: Float[Tensor, "rank columns"],
    support: Bool[Tensor, "rank columns"],
    residual: Float[Tensor, "rows columns"],
) -> None:
    """Make one pass over all atoms, in place; the residual Y - AX is updated as well."""
    worst = iter(residual.square().sum(dim=0).argsort(descending=True, stable=True).tolist())
    for index in range(atoms.shape[1]):
        users = support[index].nonzero()[:, 0]
        values = coefficients[index, users]
        if not bool(values.any()):
            column = residual[:, next(worst, 0)]
            length = torch.linalg.vector_norm(column)
            if float(length) > 0:
                atoms[:, index] = column / length
            continue
        left = residual[:, users] + atoms[:, index, None] * values
        atom = left @ values
        atom = atom / torch.linalg.vector_norm(atom)
        if not bool(torch.isfinite(atom).all()):
            continue
        values = atom @ left
        atoms[:, index] = atom
        coefficients[index, users] = values
        residual[:, users] = left - atom[:, None] * values


def _energy(residual: Float[Tensor, "rows columns"]) -> float:
    return float(residual.square().sum(dim=0).sum(dtype=torch.float64))
