"""The loops for CPUs, compiled by numba when first called, and kept next to the package or in the user's cache.

Columns are divided among as many threads as torch uses. Their results do not depend on it.
"""

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from rocket_core.linalg.code_grids import Levels
from rocket_core.linalg.kernels.rate import Rate
from rocket_core.linalg.kernels.tries import Tries

NAME = "numba"
BLOCK = 64

# Columns of a block that the fastest cache holds.
_TILE = 64
# Levels of a table from which on it is faster to search it than to compare with every level.
_LONG_TABLE = 64
# Operations of about as much time as starting a thread takes.
_WORTH_A_THREAD = 2**19


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
    arrays = [part.numpy() for part in (rest, codes, errors, factor.contiguous(), steps)]
    choice = _choice(levels, rate, rest.dtype)
    _by_columns(
        rest.shape[1], len(rest) * rest.numel(), lambda first, last: _round_block(*arrays, *choice, first, last)
    )
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
    """See `Kernels.descend`: most visits compare, and only a changed code costs a pass over its column of the slope."""
    # What belongs to one column is contiguous.
    own, rows, sizes = (part.mT.contiguous() for part in (codes, slope, steps))
    arrays = [part.numpy() for part in (own, rows, sizes, matrix.contiguous(), matrix.diagonal().contiguous(), order)]
    choice = _choice(levels, rate, codes.dtype)
    _by_columns(len(own), len(order) * own.numel(), lambda first, last: _descend(*arrays, *choice, sweeps, first, last))
    codes.copy_(own.mT)
    slope.copy_(rows.mT)


def best_scales(
    weight: Float[Tensor, "groups size columns"],
    importance: Float[Tensor, "groups size 1"],
    first: Float[Tensor, "groups columns"],
    tries: Tries,
) -> Float[Tensor, "groups columns"]:
    """See `Kernels.best_scales`: a quotient serves both signs."""
    best = torch.full_like(first, tries.unit)
    lowest, highest = (int(place) for place in first.aminmax())
    # All places from the first to the last that any group tries.
    scales = tries.scales(torch.arange(lowest, highest + tries.count, dtype=first.dtype))
    places = (first - lowest).int()
    arrays = [part.numpy() for part in (weight, importance.flatten(1), places, scales, best)]
    numbers = _choice(Levels(least=-tries.half, largest=tries.half - 1), None, weight.dtype)[:3]
    _by_columns(
        weight.shape[2],
        weight.numel() * tries.count,
        lambda first, last: _best_scales(*arrays, tries.count, *numbers, tries.positive, first, last),
    )
    return best


def code_moments(
    weight: Float[Tensor, "groups size columns"],
    importance: Float[Tensor, "groups size 1"],
    steps: Float[Tensor, "groups columns"],
    offsets: Float[Tensor, "groups columns"] | None,
    levels: Levels,
) -> Float64[Tensor, "3 groups columns"]:
    """See `Kernels.code_moments`."""
    found = torch.zeros(3, *steps.shape, dtype=torch.float64)
    offsets = torch.zeros_like(steps) if offsets is None else offsets
    arrays = [part.numpy() for part in (weight, importance.flatten(1), steps, offsets, found)]
    numbers = _choice(levels, None, weight.dtype)[:4]
    _by_columns(weight.shape[2], weight.numel(), lambda first, last: _code_moments(*arrays, *numbers, first, last))
    return found


def _choice(levels: Levels, rate: Rate | None, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the arguments of a kernel from `least` to `worth`."""
    # The last bit of 1.5 / eps is one.
    numbers = torch.tensor([levels.least, levels.largest, 1.5 / torch.finfo(dtype).eps], dtype=dtype).numpy()
    table = None if levels.table is None else torch.tensor(levels.table, dtype=dtype).numpy()
    lengths, worth = (None, None) if rate is None else (part.to(dtype).numpy() for part in (rate.lengths, rate.worth))
    return *numbers, table, lengths, worth


def _by_columns(columns: int, operations: int, act: Callable[[int, int], object]) -> None:
    """Do something for ranges of columns, each in a thread, if that takes longer than to start threads."""
    threads = min(torch.get_num_threads(), columns, operations // _WORTH_A_THREAD)
    if threads <= 1:
        act(0, columns)
        return
    bounds = [columns * part // threads for part in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(act, bounds[:-1], bounds[1:]))


def _inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function a part of the compiled functions that call it."""
    return numba.njit(inspect.unwrap(function), inline="always", error_model="numpy")  # type: ignore[no-any-return]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for the types of its arguments; sums are not reordered."""
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract"}, "error_model": "numpy"}
    # Checks of types around it, as in tests, cannot be compiled.
    function = inspect.unwrap(function)
    try:
        return numba.njit(function, cache=True, **options)  # type: ignore[no-any-return]
    except RuntimeError:  # no place to keep it, as in a confined process
        return numba.njit(function, **options)  # type: ignore[no-any-return]


@_inlined
def _nearest(part: Any, least: Any, largest: Any, whole: Any, table: Any) -> Any:
    """Return the nearest code; adding and subtracting `whole` rounds to an integer, with instructions for vectors."""
    if table is None:
        inside = part if part > least else least
        inside = inside if inside < largest else largest
        return (inside + whole) - whole
    place, last = 0, len(table) - 1
    while place < last:
        middle = (place + last) // 2
        if 2 * part > table[middle] + table[middle + 1]:
            place = middle + 1
        else:
            last = middle
    return table[place]


@compiled
def _round_block(
    rest: Any,
    codes: Any,
    errors: Any,
    factor: Any,
    steps: Any,
    least: Any,
    largest: Any,
    whole: Any,
    table: Any,
    lengths: Any,
    worth: Any,
    first: int,
    last: int,
) -> None:
    for begin in range(first, last, _TILE):
        end = min(begin + _TILE, last)
        for i in range(len(rest)):
            pivot = factor[i, i]
            # Views: indices from zero need no test for negative ones, which would keep the loops from using vectors.
            own, step, code, error = rest[i, begin:end], steps[i, begin:end], codes[i, begin:end], errors[i, begin:end]
            if lengths is None:
                for j in range(len(own)):
                    code[j] = _nearest(own[j] / step[j], least, largest, whole, table)
            else:
                for j in range(len(own)):
                    part, price = own[j] / step[j], worth[begin + j] * pivot * pivot
                    best = _nearest(part, least, largest, whole, table)
                    inner = best - np.sign(best)
                    cost = lengths[int(best) + 127] * price + (part - best) * (part - best)
                    if lengths[int(inner) + 127] * price + (part - inner) * (part - inner) < cost:
                        best = inner
                    code[j] = best
            for j in range(len(own)):
                error[j] = (own[j] - code[j] * step[j]) / pivot
            for k in range(i + 1, len(rest)):
                entry, later = factor[i, k], rest[k, begin:end]
                for j in range(len(later)):
                    later[j] -= entry * error[j]


@compiled
def _descend(
    codes: Any,
    slope: Any,
    steps: Any,
    matrix: Any,
    diagonal: Any,
    order: Any,
    least: Any,
    largest: Any,
    whole: Any,
    table: Any,
    lengths: Any,
    worth: Any,
    sweeps: int,
    first: int,
    last: int,
) -> None:
    # The least distance of two codes.
    apart = least - least + 1
    if table is not None:
        apart = (table[1:] - table[:-1]).min()
    for j in range(first, last):
        row, own, step = slope[j], codes[j], steps[j]
        for _ in range(sweeps):
            changed = False
            for i in order:
                unit, old = diagonal[i] * step[i], own[i]
                if lengths is None:
                    if 2 * abs(row[i]) <= apart * abs(unit):
                        continue
                    code = _nearest(old + row[i] / unit, least, largest, whole, table)
                else:
                    part, price = old + row[i] / unit, worth[j] / diagonal[i]
                    code = _nearest(part, least, largest, whole, table)
                    inner = code - np.sign(code)
                    cost = lengths[int(code) + 127] * price + (part - code) * (part - code)
                    other = lengths[int(inner) + 127] * price + (part - inner) * (part - inner)
                    if other < cost:
                        code, cost = inner, other
                    if lengths[int(old) + 127] * price + (part - old) * (part - old) < cost:
                        code = old
                if code != old:
                    change, line = (code - old) * step[i], matrix[i]
                    for k in range(len(row)):
                        row[k] -= line[k] * change
                    own[i] = code
                    changed = True
            if not changed:
                break


@compiled
def _best_scales(
    weight: Any,
    importance: Any,
    places: Any,
    scales: Any,
    best: Any,
    count: int,
    least: Any,
    largest: Any,
    whole: Any,
    positive: bool,
    first: int,
    last: int,
) -> None:
    groups, size, _ = weight.shape
    for begin in range(first, last, _TILE):
        end = min(begin + _TILE, last)
        width = end - begin
        scale, lowest = np.empty(width, weight.dtype), np.empty(width, weight.dtype)
        upward, downward = np.empty(width, weight.dtype), np.empty(width, weight.dtype)
        for g in range(groups):
            place, chosen = places[g, begin:end], best[g, begin:end]
            lowest[:] = np.inf
            for step in range(count):
                for j in range(width):
                    scale[j] = scales[place[j] + step]
                upward[:] = downward[:] = least - least
                for i in range(size):
                    own, worth = weight[g, i, begin:end], importance[g, i]
                    for j in range(width):
                        part = own[j] / scale[j]
                        error = _nearest(part, least, largest, whole, None) * scale[j] - own[j]
                        upward[j] += error * error * worth
                        # With a negative scale: codes of opposite sign.
                        error = _nearest(part, -largest, -least, whole, None) * scale[j] - own[j]
                        downward[j] += error * error * worth
                for j in range(width):
                    if upward[j] < lowest[j]:
                        lowest[j], chosen[j] = upward[j], scale[j]
                    if not positive and downward[j] < lowest[j]:
                        lowest[j], chosen[j] = downward[j], -scale[j]


@compiled
def _code_moments(
    weight: Any,
    importance: Any,
    steps: Any,
    offsets: Any,
    found: Any,
    least: Any,
    largest: Any,
    whole: Any,
    table: Any,
    first: int,
    last: int,
) -> None:
    groups, size, _ = weight.shape
    for begin in range(first, last, _TILE):
        end = min(begin + _TILE, last)
        width = end - begin
        code, twice = np.empty(width, weight.dtype), np.empty(width, weight.dtype)
        for g in range(groups):
            step, offset = steps[g, begin:end], offsets[g, begin:end]
            second, mean, mixed = found[0, g, begin:end], found[1, g, begin:end], found[2, g, begin:end]
            for i in range(size):
                own, worth = weight[g, i, begin:end], importance[g, i]
                if table is None or len(table) > _LONG_TABLE:
                    for j in range(width):
                        code[j] = _nearest((own[j] + offset[j]) / step[j], least, largest, whole, table)
                else:
                    for j in range(width):
                        twice[j] = (own[j] + offset[j]) / step[j]
                        twice[j] += twice[j]
                        code[j] = table[0]
                    # One level after another for all columns, which vectors can do.
                    for k in range(1, len(table)):
                        middle, level = table[k - 1] + table[k], table[k]
                        for j in range(width):
                            code[j] = level if twice[j] > middle else code[j]
                for j in range(width):
                    weighted = code[j] * worth
                    second[j] += weighted * code[j]
                    mean[j] += weighted
                    mixed[j] += weighted * own[j]
