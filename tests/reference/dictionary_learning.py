"""Orthogonal matching pursuit column by column, each step with a fresh `lstsq`."""

import torch


def orthogonal_matching_pursuit(atoms, targets, nonzeros):
    """Choose the atom that the residual correlates with most, then least squares on all chosen so far; repeat."""
    coefficients = torch.zeros(atoms.shape[1], targets.shape[1], dtype=torch.float64)
    for j in range(targets.shape[1]):
        chosen = []
        values = torch.zeros(0, dtype=torch.float64)
        for _ in range(nonzeros):
            residual = targets[:, j] - atoms[:, chosen] @ values
            scores = [-1.0 if i in chosen else abs(float(atoms[:, i] @ residual)) for i in range(atoms.shape[1])]
            chosen.append(max(range(len(scores)), key=scores.__getitem__))
            values = torch.linalg.lstsq(atoms[:, chosen], targets[:, j], driver="gelsd").solution
        coefficients[chosen, j] = values
    return coefficients
