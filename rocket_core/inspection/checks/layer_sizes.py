"""Sizes that a layer may have once it is stored, from its shape alone. Loads no torch."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache

from rocket_core.config import PROFILE_RANK_NNZ_RATIOS, PROFILE_RATIOS
from rocket_core.inspection.checks.preconditions import MAX_SHAPES
from rocket_core.sizes import budget
from rocket_core.sizes.budget import Shape
from rocket_core.sizes.code_format import (
    ANY_CODES,
    CodeChoices,
    fewest_bytes,
    fewest_coded_bytes,
    fewest_factor_bytes,
    most_coded_bytes,
)
from rocket_core.sizes.reachability import Reach
from rocket_core.sizes.target import ByFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSize:
    """What a layer keeps when dense, at least, and at most if it is made as small as possible; see `Reach`."""

    dense: int
    smallest: int
    certain: int
    parameters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """Sizes of layers: in bytes if they may be quantized, otherwise in parameters.

    Attributes:
        itemsize: bytes of a stored number.
        counts_bytes: whether layers may be quantized, so that sizes are in bytes.
        only: the format of every layer, if the method stores them in one.
        codes: the formats that quantized layers may have.
    """

    itemsize: int
    counts_bytes: bool
    only: ByFormat | None = None
    codes: CodeChoices = ANY_CODES

    def of_each(self, shapes: Iterable[Shape]) -> list[LayerSize]:
        """Return the sizes of layers; that of a shape is computed once."""
        found: dict[Shape, LayerSize] = {}
        return [found[shape] if shape in found else found.setdefault(shape, self.of(*shape)) for shape in shapes]

    def of(self, d_in: int, d_out: int) -> LayerSize:
        """Return the size of a layer."""
        parameters = d_in * d_out
        dense = parameters * self.itemsize
        if self.only is not None:
            smallest = min(dense, self.only.code_format(d_in).stored_bytes(d_in, d_out))
            return LayerSize(dense=dense, smallest=smallest, certain=smallest, parameters=parameters)
        smallest, certain = _fewest_kept(d_in, d_out)
        if not self.counts_bytes:
            return LayerSize(dense=parameters, smallest=smallest, certain=certain, parameters=parameters)
        codes = [] if (fixed := self._fixed_bytes(d_in, d_out)) is None else [fixed]
        least = list(codes) if self.codes.alone else [*codes, smallest * self.itemsize]
        if self.codes.factors and (factors := fewest_factor_bytes(d_in, d_out)) is not None:
            codes.append(factors)
        if self.codes.entropy_coded:
            least.append(fewest_coded_bytes(d_in, d_out))
            # A layer has no candidates of more.
            codes += [most for most in [most_coded_bytes(d_in, d_out)] if most < parameters]
        # How small zeros and factors can be depends on the layer, so that only codes are certain.
        return LayerSize(
            dense=dense,
            smallest=min([dense, *least, *codes]),
            certain=min([dense, *codes]),
            parameters=parameters,
        )

    def table(self, d_in: int, d_out: int) -> LayerSize:
        """Return the size of a token embedding or head that may be quantized."""
        parameters = d_in * d_out
        dense = parameters * self.itemsize
        codes = fewest_bytes(d_in, d_out, self.codes.of_tables)
        fewest = dense if codes is None else min(dense, codes)
        return LayerSize(dense=dense, smallest=fewest, certain=fewest, parameters=parameters)

    def either_way(self, shape: Shape, count: int) -> LayerSize:
        """Return the size of a number of weights whose orientation is unknown."""
        one, other = self.of(*shape), self.of(*reversed(shape))
        return LayerSize(
            dense=count * one.dense,
            smallest=count * min(one.smallest, other.smallest),
            certain=count * max(one.certain, other.certain),
            parameters=count * one.parameters,
        )

    def _fixed_bytes(self, d_in: int, d_out: int) -> int | None:
        return fewest_bytes(d_in, d_out, self.codes) if self.codes.fixed else None

    def reach(self, sizes: Collection[LayerSize], *, other_bytes: int = 0) -> Reach:
        """Return the reach of layers together."""
        return Reach(
            unit="bytes" if self.counts_bytes else "parameters",
            dense=sum(size.dense for size in sizes),
            smallest=sum(size.smallest for size in sizes),
            certain=sum(size.certain for size in sizes),
            parameters=sum(size.parameters for size in sizes),
            unit_bytes=1 if self.counts_bytes else self.itemsize,
            other_bytes=other_bytes,
        )


@lru_cache(maxsize=4 * MAX_SHAPES)
def _fewest_kept(d_in: int, d_out: int) -> tuple[int, int]:
    """Return the fewest parameters that a layer's profile may keep, and the fewest that it is guaranteed to offer."""
    kept = [
        [budget.kept_parameters(d_in, *shape) for shape in shapes]
        for shapes in (budget.candidate_shapes(d_in, d_out, ratio, PROFILE_RANK_NNZ_RATIOS) for ratio in PROFILE_RATIOS)
        if shapes
    ]
    dense = d_in * d_out
    return min(map(min, kept), default=dense), min(map(max, kept), default=dense)
