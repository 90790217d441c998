"""The loops in torch: the readable reference, and what runs where neither numba nor Triton does."""

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from rocket_core.linalg.code_grids import Levels
from rocket_core.linalg.kernels.rate import LARGEST_CODE, Rate
from rocket_core.linalg.kernels.tries import Tries

NAME = "torch"
BLOCK = 64

# Numbers that are rounded at once to several scales, as small layers take no longer with many than with few.
_TRIED_AT_ONCE = 2**18


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
        for begin in range(0, len(order), BLOCK):
            block = order[begin : begin + BLOCK]
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


def best_scales(
    weight: Float[Tensor, "groups size columns"],
    importance: Float[Tensor, "groups size 1"],
    first: Float[Tensor, "groups columns"],
    tries: Tries,
) -> Float[Tensor, "groups columns"]:
    """See `Kernels.best_scales`."""
    least, best = torch.full_like(first, torch.inf), torch.full_like(first, tries.unit)
    signs = first.new_tensor([1.0] if tries.positive else [1.0, -1.0])[:, None, None]
    steps = torch.arange(tries.count, device=first.device, dtype=first.dtype)[:, None, None, None]
    for some in torch.split(steps, max(1, _TRIED_AT_ONCE // (len(signs) * weight.numel()))):
        scales = (tries.scales(first + some) * signs).flatten(0, 1)
        rounded = (weight / scales[:, :, None]).round_().clamp_(-tries.half, tries.half - 1).mul_(scales[:, :, None])
        errors = rounded.sub_(weight).square_().mul_(importance).sum(dim=2)
        place = errors.argmin(dim=0, keepdim=True)  # the first of equal ones
        error, scale = errors.gather(0, place)[0], scales.gather(0, place)[0]
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def code_moments(
    weight: Float[Tensor, "groups size columns"],
    importance: Float[Tensor, "groups size 1"],
    steps: Float[Tensor, "groups columns"],
    offsets: Float[Tensor, "groups columns"] | None,
    levels: Levels,
) -> Float64[Tensor, "3 groups columns"]:
    """See `Kernels.code_moments`."""
    codes = levels.nearest_((weight if offsets is None else weight + offsets[:, None]) / steps[:, None])
    weighted = codes * importance
    return torch.stack(
        [part.sum(dim=1, dtype=torch.float64) for part in (weighted * codes, weighted, weighted * weight)]
    )


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
