"""The loops for GPUs, in Triton: a program visits the inputs of some columns, of which its registers hold a tile."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int64
from torch import Tensor

from rocket_core.linalg.code_grids import Levels
from rocket_core.linalg.kernels.rate import Rate
from rocket_core.linalg.kernels.reference import code_moments
from rocket_core.linalg.kernels.tries import Tries

__all__ = ["BLOCK", "NAME", "best_scales", "code_moments", "descend", "round_block"]

NAME = "triton"
# Each launch takes the host longer than the device needs for few inputs.
BLOCK = 1024

_TILE = 64
_COLUMNS = 16
_WARPS = 4
# Scales that a program tries at once, for so many columns.
_TRIED, _TRIED_COLUMNS = 64, 32
# Sweeps after which the host asks whether codes still change.
_ASKED = 4


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
    choice = _Choice(levels, rate, rest)
    _launch(rest, codes, errors, factor.contiguous(), steps, choice, descends=False)
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
    """See `Kernels.descend`: a product for each block of inputs carries its changes to the slope of all."""
    choice = _Choice(levels, rate, codes)
    ordered = matrix[order][:, order]
    own, rows, sizes = codes[order], slope[order], steps[order]
    bounds = [(begin, min(begin + BLOCK, len(own))) for begin in range(0, len(own), BLOCK)]
    blocks = [ordered[begin:end, begin:end].contiguous() for begin, end in bounds]
    for sweep in range(sweeps):
        before = own.clone() if sweep % _ASKED == _ASKED - 1 else None
        for (begin, end), block in zip(bounds, blocks, strict=True):
            moved = torch.empty_like(own[begin:end])
            # The kernel changes its copy of the slope; the product below changes that of all inputs alike.
            _launch(rows[begin:end], own[begin:end], moved, block, sizes[begin:end], choice, descends=True)
            rows.addmm_(ordered[:, begin:end], moved, alpha=-1)
        if before is not None and torch.equal(before, own):
            break
    codes[order], slope[order] = own, rows


def best_scales(
    weight: Float[Tensor, "groups size columns"],
    importance: Float[Tensor, "groups size 1"],
    first: Float[Tensor, "groups columns"],
    tries: Tries,
) -> Float[Tensor, "groups columns"]:
    """See `Kernels.best_scales`: registers hold the errors of many scales, and the weight is read once for all."""
    groups, size, columns = weight.shape
    best = torch.empty_like(first)
    signs = 1 if tries.positive else 2
    _scan[(groups * triton.cdiv(columns, _TRIED_COLUMNS),)](
        weight.contiguous(),
        importance.contiguous(),
        first.contiguous(),
        best,
        size,
        columns,
        tries.unit,
        tries.per_octave,
        tries.last,
        tries.count * signs,
        float(-tries.half),
        float(tries.half - 1),
        signs=signs,
        tried=_TRIED,
        width=_TRIED_COLUMNS,
        num_warps=_WARPS,
    )
    return best


class _Choice:
    """What a kernel needs to choose codes."""

    def __init__(self, levels: Levels, rate: Rate | None, like: Tensor) -> None:
        self.least, self.largest = float(levels.least), float(levels.largest)
        self.levels = len(levels.table or ())
        # Tensors that the kernel does not read may be any.
        self.table = like.new_tensor(levels.table) if levels.table else like
        self.rated = rate is not None
        self.lengths, self.worth = (like, like) if rate is None else (rate.lengths.to(like), rate.worth.to(like))


def _launch(
    rows: Tensor, codes: Tensor, out: Tensor, matrix: Tensor, steps: Tensor, choice: _Choice, *, descends: bool
) -> None:
    size, columns = rows.shape
    _visit[(triton.cdiv(columns, _COLUMNS),)](
        rows,
        codes,
        out,
        matrix,
        steps,
        choice.table,
        choice.lengths,
        choice.worth,
        size,
        columns,
        choice.least,
        choice.largest,
        levels=choice.levels,
        rated=choice.rated,
        descends=descends,
        limit=BLOCK,
        block=_TILE,
        width=_COLUMNS,
        num_warps=_WARPS,
    )


@triton.jit
def _rounded(parts, least, largest):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Return the nearest integers, half to even, as torch rounds."""
    best = tl.floor(parts + 0.5)
    best = tl.where((best - parts == 0.5) & (2.0 * tl.floor(best * 0.5) != best), best - 1.0, best)
    return tl.minimum(tl.maximum(best, least), largest)


@triton.jit  # type: ignore[untyped-decorator]
def _best(  # type: ignore[no-untyped-def]  # noqa: ANN202
    ideal,  # noqa: ANN001
    old,  # noqa: ANN001
    pivot,  # noqa: ANN001
    price,  # noqa: ANN001
    table,  # noqa: ANN001
    lengths,  # noqa: ANN001
    least,  # noqa: ANN001
    largest,  # noqa: ANN001
    levels: tl.constexpr,
    rated: tl.constexpr,
    descends: tl.constexpr,
):
    """Return the best code of an input, of each column."""
    if levels == 0:
        best = _rounded(ideal, least, largest)
    elif levels < 64:
        best = tl.zeros_like(ideal) + tl.load(table)
        for level in tl.static_range(1, levels):
            upper = tl.load(table + level)
            best = tl.where(2.0 * ideal > tl.load(table + level - 1) + upper, upper, best)
    else:
        # Binary search in a table of at most 256 levels.
        place = tl.zeros_like(ideal).to(tl.int32)
        for half in tl.static_range(8):
            tried = place + (128 >> half)
            upper = tl.minimum(tried, levels - 1)
            higher = 2.0 * ideal > tl.load(table + upper - 1) + tl.load(table + upper)
            place = tl.where((tried < levels) & higher, tried, place)
        best = tl.load(table + place)
    if rated:
        bit = price / pivot if descends else price * pivot * pivot
        sign = tl.where(best > 0, 1.0, tl.where(best < 0, -1.0, 0.0))
        inner = best - sign
        cost = tl.load(lengths + best.to(tl.int32) + 127) * bit + (ideal - best) * (ideal - best)
        other = tl.load(lengths + inner.to(tl.int32) + 127) * bit + (ideal - inner) * (ideal - inner)
        best = tl.where(other < cost, inner, best)
        if descends:
            kept = tl.load(lengths + old.to(tl.int32) + 127) * bit + (ideal - old) * (ideal - old)
            best = tl.where(kept < tl.minimum(cost, other), old, best)
    return best


# Compiled once for all shapes.
@triton.jit(do_not_specialize=["size", "columns"])  # type: ignore[untyped-decorator]
def _visit(  # type: ignore[no-untyped-def]  # noqa: ANN202
    rows,  # noqa: ANN001
    codes,  # noqa: ANN001
    out,  # noqa: ANN001
    matrix,  # noqa: ANN001
    steps,  # noqa: ANN001
    table,  # noqa: ANN001
    lengths,  # noqa: ANN001
    worth,  # noqa: ANN001
    size,  # noqa: ANN001
    columns,  # noqa: ANN001
    least,  # noqa: ANN001
    largest,  # noqa: ANN001
    levels: tl.constexpr,
    rated: tl.constexpr,
    descends: tl.constexpr,
    limit: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
):
    """Visit the inputs of some columns.

    Rounding: `rows` is what is left of the weight, `matrix` the factor, `out` gets the errors. Descent: `rows` is the
    slope, `matrix` G, `out` gets what was added to the rounded weight, and `codes` are read first.
    """
    place = tl.arange(0, block)
    column = tl.program_id(0) * width + tl.arange(0, width)
    inside = column < columns
    price = tl.load(worth + column, mask=inside, other=0.0) if rated else 0.0
    # Triton's interpreter takes no bounds of loops that are arguments.
    for begin in range(0, limit, block):
        if begin < size:
            rest = size - begin
            where = (begin + place)[:, None] * columns + column[None, :]
            mask = (place[:, None] < rest) & inside[None, :]
            tile = tl.load(rows + where, mask=mask, other=0.0)
            for start in range(0, begin, width):
                # What inputs of earlier tiles change; more at once would not fit in the registers.
                earlier = start + tl.arange(0, width)
                lines = matrix + earlier[:, None] * size + (begin + place)[None, :]
                part = tl.load(lines, mask=place[None, :] < rest, other=0.0)
                changes = tl.load(out + earlier[:, None] * columns + column[None, :], mask=inside[None, :], other=0.0)
                tile -= tl.dot(tl.trans(part), changes, input_precision="ieee", out_dtype=tile.dtype)
            step = tl.load(steps + where, mask=mask, other=1.0)
            code = tl.load(codes + where, mask=mask, other=0.0) if descends else tl.zeros_like(tile)
            result = tl.zeros_like(tile)
            own_matrix = matrix + begin * size + begin
            for i in range(block):
                own = place[:, None] == i
                line = tl.load(own_matrix + i * size + place, mask=(place < rest) & (i < rest), other=0.0)
                pivot = tl.load(own_matrix + i * size + i, mask=i < rest, other=1.0)
                value = tl.sum(tl.where(own, tile, 0.0), axis=0)
                unit = tl.sum(tl.where(own, step, 0.0), axis=0)
                old = tl.sum(tl.where(own, code, 0.0), axis=0)
                ideal = old + value / (pivot * unit) if descends else value / unit
                best = _best(ideal, old, pivot, price, table, lengths, least, largest, levels, rated, descends)
                if descends:
                    moved = (best - old) * unit
                    tile -= line[:, None] * moved[None, :]
                    result = tl.where(own, result + moved[None, :], result)
                else:
                    error = (value - best * unit) / pivot
                    tile = tl.where(place[:, None] > i, tile - line[:, None] * error[None, :], tile)
                    result = tl.where(own, error[None, :], result)
                code = tl.where(own, best[None, :], code)
            tl.store(codes + where, code, mask=mask)
            tl.store(out + where, result, mask=mask)
            # Other threads of this program read them for the next tile.
            tl.debug_barrier()


# Compiled once for all shapes.
@triton.jit(do_not_specialize=["size", "columns", "per_octave", "total"])  # type: ignore[untyped-decorator]
def _scan(  # type: ignore[no-untyped-def]  # noqa: ANN202
    weight,  # noqa: ANN001
    importance,  # noqa: ANN001
    first,  # noqa: ANN001
    best,  # noqa: ANN001
    size,  # noqa: ANN001
    columns,  # noqa: ANN001
    unit,  # noqa: ANN001
    per_octave,  # noqa: ANN001
    last,  # noqa: ANN001
    total,  # noqa: ANN001
    least,  # noqa: ANN001
    largest,  # noqa: ANN001
    signs: tl.constexpr,
    tried: tl.constexpr,
    width: tl.constexpr,
):
    """Find the best scale for some columns of a group."""
    parts = (columns + width - 1) // width
    group = tl.program_id(0) // parts
    column = (tl.program_id(0) % parts) * width + tl.arange(0, width)
    inside = column < columns
    begin = tl.load(first + group * columns + column, mask=inside, other=0.0)
    chosen, lowest = tl.zeros_like(begin) + unit, tl.zeros_like(begin) + float("inf")
    start = 0
    while start < total:
        number = start + tl.arange(0, tried)
        place = tl.minimum(begin[None, :] + (number // signs)[:, None].to(begin.dtype), last)
        scale = unit * tl.exp2(-place / per_octave)
        scale = tl.where((number % signs == 1)[:, None], -scale, scale)
        error = tl.zeros_like(scale)
        i = 0
        while i < size:
            value = tl.load(weight + (group * size + i) * columns + column, mask=inside, other=0.0)[None, :]
            removed = _rounded(value / scale, least, largest) * scale - value
            error += removed * removed * tl.load(importance + group * size + i)
            i += 1
        error = tl.where((number < total)[:, None], error, float("inf"))
        # The first of equal ones.
        at = tl.argmin(error, axis=0)
        found = tl.min(error, axis=0)
        there = tl.sum(tl.where(tl.arange(0, tried)[:, None] == at[None, :], scale, 0.0), axis=0)
        chosen = tl.where(found < lowest, there, chosen)
        lowest = tl.minimum(found, lowest)
        start += tried
    tl.store(best + group * columns + column, chosen, mask=inside)
