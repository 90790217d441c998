"""Rounding by definition, in float64 and without regard to time."""

import numpy as np


def output_error(gram, weight, rounded):
    """Return (w - w̃)ᵀG(w - w̃) of each column."""
    difference = np.asarray(weight - rounded)
    return np.einsum("ij,ik,kj->j", difference, np.asarray(gram), difference)


def code(part, bits):
    """Return the nearest integer that a code can be; halves are rounded to even."""
    return min(max(int(np.rint(part)), -(2 ** (bits - 1))), 2 ** (bits - 1) - 1)


def round_in_order(gram, weight, steps, order, bits):
    """Round one input after another, the inputs that remain being refitted from scratch each time.

    Args:
        gram: positive definite.
        weight: d_in x d_out.
        steps: scale of every entry.
        order: inputs in the order of rounding.
        bits: bits of a code.

    Returns:
        The codes.
    """
    gram, weight, steps = (np.asarray(array, dtype=np.float64) for array in (gram, weight, steps))
    codes = np.zeros_like(weight)
    for column in range(weight.shape[1]):
        error = np.zeros(len(weight))
        for place, row in enumerate(order):
            free, done = list(order[place:]), list(order[:place])
            correction = np.linalg.solve(gram[np.ix_(free, free)], gram[np.ix_(free, done)] @ error[done])
            value = weight[row, column] + correction[0]
            codes[row, column] = code(value / steps[row, column], bits)
            error[row] = weight[row, column] - codes[row, column] * steps[row, column]
    return codes


def least_scale_error(values, importance, bits, scales):
    """Return the least weighted squared error of values rounded to nearest with one of the scales."""
    return min(
        sum(h * (value - scale * code(value / scale, bits)) ** 2 for value, h in zip(values, importance, strict=True))
        for scale in scales
    )
