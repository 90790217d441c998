"""Time needed to profile layers with integer codes, and to store them as codes. Loads no torch.

Costs were fitted to the processor time of random layers with 192 to 4,096 inputs and 64 to 8,192 outputs by
`python -m benchmarks.code_duration --fit`; without `--fit`, it compares them with the time that layers take.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rocket_core.config import KINDS, CompressionConfig
from rocket_core.estimates.operations import FLOAT32_BYTES, Operations
from rocket_core.sizes.block_types import BLOCK_TYPES, block_types_for
from rocket_core.sizes.budget import Shape
from rocket_core.sizes.code_format import formats_for

# Outputs on which codes are measured, see `methods.sampled_outputs`.
_LEAST_SAMPLED, _SAMPLED_PART, _MOST_SAMPLED = 128, 8, 4096

CodeWorkName = Literal[
    "profile_in_file", "profile_in_memory", "profile_formats", "profile_blocks", "entropy", "fixed", "small", "large"
]
"""What is done with a layer: profiles of all kinds that a file or memory may have, of formats of fixed bits, and of
block types; codes of variable and of fixed length, and of block types of one group and of several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """Cost of a layer.

    Attributes:
        cubes: multiples of d_in³ operations in products, once for all formats.
        sampled: products of the Gram matrix with the sampled outputs, of 2 d_in² operations each.
        whole: the same with all outputs.
        sampled_passes: passes over the sampled outputs.
        passes: passes over the weight.
        seconds: seconds for each layer.
    """

    cubes: float = 0.0
    sampled: float = 0.0
    whole: float = 0.0
    sampled_passes: float = 0.0
    passes: float = 0.0
    seconds: float = 0.0

    def of(self, shape: Shape, formats: int = 1) -> Operations:
        """Return the operations of a layer."""
        d_in, d_out = shape
        sampled = min(d_out, _MOST_SAMPLED, max(_LEAST_SAMPLED, -(-d_out // _SAMPLED_PART)))
        each = Operations(
            products=2 * d_in**2 * (self.sampled * sampled + self.whole * d_out),
            memory=d_in * (self.sampled_passes * sampled + self.passes * d_out) * FLOAT32_BYTES,
            seconds=self.seconds,
        )
        return Operations(products=self.cubes * d_in**3) + each.times(formats)


COSTS: Mapping[CodeWorkName, LayerCost] = {
    "profile_in_file": LayerCost(cubes=1.77, sampled=43.6, whole=1.45, passes=162, seconds=0.0454),
    "profile_in_memory": LayerCost(cubes=2.37, sampled=32.2, whole=9.96, passes=534, seconds=0.0508),
    "profile_formats": LayerCost(cubes=2.3, sampled=1.08, sampled_passes=71.6, seconds=0.00103),
    "profile_blocks": LayerCost(cubes=2.38, sampled=1.79, sampled_passes=91.2, seconds=0.00745),
    "entropy": LayerCost(cubes=2.49, whole=2.78, passes=367, seconds=0.00552),
    "fixed": LayerCost(cubes=2.65, whole=6.91, passes=119, seconds=0.00355),
    "small": LayerCost(cubes=3.14, whole=11.7, passes=158, seconds=0.0164),
    "large": LayerCost(cubes=2.91, whole=7.3, passes=567, seconds=0.0232),
}
"""The cost of each; of one format or block type for profiles of these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeWork:
    """What is done with a layer.

    Attributes:
        name: see `CodeWorkName`.
        formats: number of formats, where the cost is that of each.
    """

    name: CodeWorkName
    formats: int = 1

    def of(self, shape: Shape) -> Operations:
        """Return the operations for a layer."""
        return COSTS[self.name].of(shape, self.formats)


def why_codes_are_uncounted(config: CompressionConfig) -> str | None:
    """Return why the operations of a compression to codes are not known; None if they are."""
    if config.reader.codes.alone or config.kinds == ("quantized",):
        return None
    if config.code_bits is not None or config.group_size is not None:
        return "the operations are not counted where code_bits or group_size limit the codes next to other kinds"
    if set(config.kinds) != set(KINDS):
        return "the operations of this choice of kinds are not counted"
    return None


def profile_work(shape: Shape, config: CompressionConfig, *, is_table: bool = False) -> CodeWork:
    """Return what profiles a layer with all kinds that it may have, without shared dictionaries.

    Args:
        shape: `(d_in, d_out)`.
        config: settings for which `why_codes_are_uncounted` gives no reason.
        is_table: whether it is a token embedding or head, which may have codes of fixed bits only.
    """
    if not is_table and config.entropy_codes:
        return CodeWork(name="profile_in_file")
    if not is_table and config.codes_factors:
        return CodeWork(name="profile_in_memory")
    choices = config.code_choices
    if choices.blocks:
        return CodeWork(name="profile_blocks", formats=len(block_types_for(shape[0], choices.blocks)))
    return CodeWork(name="profile_formats", formats=len(formats_for(shape[0], choices)))


def codes_work(shape: Shape, config: CompressionConfig, *, is_table: bool = False) -> CodeWork:
    """Return what stores a layer as codes; the arguments are as above, and tables are not entropy coded."""
    if config.code_choices.blocks:
        # Block types whose groups have scales of few bits take longest.
        has_large = config.code_choices.blocks == BLOCK_TYPES and len(block_types_for(shape[0])) == len(BLOCK_TYPES)
        return CodeWork(name="large" if has_large else "small")
    return CodeWork(name="entropy" if config.entropy_codes and not is_table else "fixed")
