"""The loops in torch: the readable reference, and what runs where neither numba nor Triton does."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from rocket_core.linalg.code_grids import Levels
from rocket_core.linalg.kernels.rate import LARGEST_CODE, Rate

NAME = "torch"

# Inputs that are visited before the slope of the others is corrected by one matrix product.
_BLOCK = 64


def round_block(
    rest: Float[Tensor, "size columns"],
    codes: Float[Tensor, "size columns"],
    factor: Float[Tensor, "size size"],
    steps: Float[Tensor, "size columns"],
    levels: Levels,
    rate: Rate | None,
) -> Float[Tensor, "size columns"]:
    """See `Kernels.round_block`."""
    errors = torch.empty_like(rest)
    for row in range(len(rest)):
        parts = rest[row] / steps[row]
        codes[row] = _chosen(parts, None, levels, rate, factor[row, row].square())
        errors[row] = (rest[row] - codes[row] * steps[row]) / factor[row, row]
        rest[row + 1 :].addr_(factor[row, row + 1 :], errors[row], alpha=-1)
    return errors


def descend(
    codes: Float[Tensor, "n columns"],
    slope: Float[Tensor, "n columns"],
    matrix: Float[Tensor, "n n"],
    steps: Float[Tensor, "n columns"],
    order: Int64[Tensor, " n"],
    levels: Levels,
    rate: Rate | None,
    sweeps: int,
) -> None:
    """See `Kernels.descend`."""
    for _ in range(sweeps):
        changed = False
        for begin in range(0, len(order), _BLOCK):
            block = order[begin : begin + _BLOCK]
            rows, own = slope[block], matrix[block][:, block]
            before, size = codes[block], steps[block]
            after = before.clone()
            for place in range(len(block)):
                curvature = own[place, place]
                parts = after[place] + rows[place] / (curvature * size[place])
                code = _chosen(parts, after[place], levels, rate, 1 / curvature)
                rows.addr_(own[:, place], (code - after[place]) * size[place], alpha=-1)
                after[place] = code
            moved = (after - before).mul_(size)
            if bool(moved.any()):
                changed = True
                codes[block] = after
                slope.addmm_(matrix[:, block], moved, alpha=-1)
        if not changed:
            break


def _chosen(
    parts: Float[Tensor, " columns"],
    current: Float[Tensor, " columns"] | None,
    levels: Levels,
    rate: Rate | None,
    unit: Float[Tensor, ""],
) -> Float[Tensor, " columns"]:
    """Return the nearest code, or with a rate the cheapest of it, its neighbour towards zero, and the current one.

    Args:
        parts: the best value of each entry, in steps.
        current: its code, if it has one.
        levels: what codes can be.
        rate: what bits cost.
        unit: one over the error of a squared step.
    """
    nearest = levels.nearest(parts)
    if rate is None:
        return nearest
    worth = rate.worth * unit
    best, least = nearest, torch.full_like(parts, torch.inf)
    for codes in (nearest, nearest - nearest.sign(), *([] if current is None else [current])):
        cost = rate.lengths[codes.long() + LARGEST_CODE] * worth + (parts - codes).square_()
        best, least = torch.where(cost < least, codes, best), torch.minimum(cost, least)
    return best
