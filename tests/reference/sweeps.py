"""One sweep over support, coefficients and dictionary, and the errors by several metrics: explicit, in float64."""

import numpy as np
import torch


def removal_costs(atoms, targets):
    """Return by how much ‖Y - AC‖² rises if one coefficient is left out and all others are fitted again, explicitly."""
    least = _residual(atoms, targets)
    costs = torch.zeros(atoms.shape[1], targets.shape[1], dtype=torch.float64)
    for i in range(atoms.shape[1]):
        others = torch.cat([atoms[:, :i], atoms[:, i + 1 :]], dim=1)
        costs[i] = _residual(others, targets) - least
    return costs


def sweep(targets, coefficients, nnz):
    """Fit the dictionary, the support of the costliest entries, the coefficients on it, and the dictionary again."""
    atoms = torch.linalg.lstsq(coefficients.T, targets.T, driver="gelsd").solution.T
    costs = removal_costs(atoms, targets)
    support = torch.zeros_like(costs, dtype=torch.bool)
    support.view(-1)[costs.flatten().argsort(descending=True)[:nnz]] = True
    swept = torch.zeros_like(costs)
    for j in range(targets.shape[1]):
        kept = support[:, j].nonzero()[:, 0]
        if len(kept):
            swept[kept, j] = torch.linalg.lstsq(atoms[:, kept], targets[:, j], driver="gelsd").solution
    dictionary = torch.linalg.lstsq(swept.T, targets.T, driver="gelsd").solution.T
    return support, float(torch.linalg.norm(targets - dictionary @ swept) / torch.linalg.norm(targets))


def distance(weight, approximation, metric):
    """Compute with numpy, column by column or entry by entry."""
    weight, approximation = weight.numpy(), approximation.numpy()
    difference = weight - approximation
    if metric == "frobenius":
        return (difference**2).sum() ** 0.5 / (weight**2).sum() ** 0.5
    if metric == "l1":
        return np.abs(difference).sum() / np.abs(weight).sum()
    if metric == "spectral":
        return np.linalg.svd(difference)[1][0] / np.linalg.svd(weight)[1][0]
    cosines = [
        a @ b / ((a @ a) ** 0.5 * (b @ b) ** 0.5) if a.any() and b.any() else 0.0
        for a, b in zip(weight.T, approximation.T, strict=True)
    ]
    return 1 - sum(cosines) / len(cosines)


def _residual(atoms, targets):
    if atoms.shape[1] == 0:
        return targets.square().sum(dim=0)
    fitted = atoms @ torch.linalg.lstsq(atoms, targets, driver="gelsd").solution
    return (targets - fitted).square().sum(dim=0)
