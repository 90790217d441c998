"""Time needed to profile layers with integer codes, and to store them as codes. Loads no torch.

Numbers of products, of passes over memory and of seconds were fitted to the processor time of layers with 192 to 4,096
inputs and 64 to 8,192 outputs, which they repeat within a quarter; `python -m benchmarks.code_duration` compares them
with the time that layers take.
"""

from dataclasses import dataclass

from rocket_core.config import KINDS, CompressionConfig
from rocket_core.estimates.operations import FLOAT32_BYTES, Operations
from rocket_core.sizes.block_types import BLOCK_TYPES, MLX_TYPES, block_types_for
from rocket_core.sizes.budget import Shape
from rocket_core.sizes.code_format import formats_for

# Outputs on which codes are measured, see `methods.sampled_outputs`.
_LEAST_SAMPLED, _SAMPLED_PART, _MOST_SAMPLED = 128, 8, 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cost:
    """Cost of a layer.

    Attributes:
        cubes: multiples of d_in³ operations in products.
        sampled: products of the Gram matrix with the sampled outputs, of 2 d_in² operations each.
        whole: the same with all outputs.
        sampled_passes: passes over the sampled outputs.
        passes: passes over the weight.
        input_seconds: seconds for each input, whatever it has of outputs.
        seconds: seconds for each layer.
    """

    cubes: float = 0.0
    sampled: float = 0.0
    whole: float = 0.0
    sampled_passes: float = 0.0
    passes: float = 0.0
    input_seconds: float = 0.0
    seconds: float = 0.0

    def of(self, shape: Shape) -> Operations:
        """Return the operations of a layer."""
        d_in, d_out = shape
        sampled = min(d_out, _MOST_SAMPLED, max(_LEAST_SAMPLED, -(-d_out // _SAMPLED_PART)))
        products = self.cubes * d_in**3 + 2 * d_in**2 * (self.sampled * sampled + self.whole * d_out)
        passes = d_in * (self.sampled_passes * sampled + self.passes * d_out)
        return Operations(
            products=products,
            memory=passes * FLOAT32_BYTES,
            seconds=self.input_seconds * d_in + self.seconds,
        )


# Profiles: of every kind with entropy codes, of every kind without them, of one format, and of the block types.
_ENTROPY_PROFILE = _Cost(
    sampled=20.8, whole=46.8, sampled_passes=2140, passes=617, input_seconds=2.04e-4, seconds=0.0256
)
_MEMORY_PROFILE = _Cost(cubes=1, whole=47.8, sampled_passes=2510, passes=534, input_seconds=1.03e-4, seconds=0.0567)
_FORMAT_PROFILE = _Cost(sampled=1.9, sampled_passes=99, input_seconds=1e-6)
_FORMATS_PROFILE = _Cost(cubes=3.7, input_seconds=3.05e-5, seconds=0.0052)
_SMALL_BLOCK_TYPES = 6
_SMALL_BLOCK_PROFILE = _Cost(cubes=3.59, sampled_passes=2350, passes=165, input_seconds=1.46e-4, seconds=0.021)
_BLOCK_PROFILE = _Cost(cubes=2.2, sampled=52.9, sampled_passes=6340, input_seconds=2.35e-4, seconds=0.0488)
# Compression of a layer as entropy codes, as codes of a fixed number of bits, and as blocks.
_ENTROPY = _Cost(whole=8.68, passes=394, input_seconds=1.69e-4, seconds=0.00425)
_FIXED = _Cost(whole=22, passes=280, input_seconds=1.3e-4, seconds=0.003)
_SMALL_BLOCKS = _Cost(whole=32.9, passes=307, input_seconds=1.59e-4, seconds=0.0184)
_BLOCKS = _Cost(cubes=0.5, whole=31.8, passes=3970, input_seconds=3.05e-4, seconds=0.0232)


def why_codes_are_uncounted(config: CompressionConfig) -> str | None:
    """Return why the operations of a compression to codes are not known; None if they are."""
    if config.reader.codes.alone or config.kinds == ("quantized",):
        return None
    if config.code_bits is not None or config.group_size is not None:
        return "the operations are not counted where code_bits or group_size limit the codes next to other kinds"
    if set(config.kinds) != set(KINDS):
        return "the operations of this choice of kinds are not counted"
    return None


def profiling_codes(shape: Shape, config: CompressionConfig) -> Operations:
    """Return the operations to profile a layer with all kinds that it may have, without shared dictionaries.

    Args:
        shape: `(d_in, d_out)`.
        config: settings for which `why_codes_are_uncounted` gives no reason.
    """
    if config.entropy_codes:
        return _ENTROPY_PROFILE.of(shape)
    if config.codes_factors:
        return _MEMORY_PROFILE.of(shape)
    return profiling_table(shape, config)


def profiling_table(shape: Shape, config: CompressionConfig) -> Operations:
    """Return the operations to profile a token embedding, a head, or a layer that may have codes of fixed bits only."""
    if config.code_choices.blocks == MLX_TYPES:
        return _SMALL_BLOCK_PROFILE.of(shape).times(len(MLX_TYPES) / _SMALL_BLOCK_TYPES)
    if config.code_choices.blocks:
        return (_BLOCK_PROFILE if _has_large_blocks(shape) else _SMALL_BLOCK_PROFILE).of(shape)
    formats = len(formats_for(shape[0], config.code_choices))
    each = _FORMAT_PROFILE.of(shape)
    return sum([each] * formats, _FORMATS_PROFILE.of(shape))


def compressing_codes(shape: Shape, config: CompressionConfig, *, is_table: bool = False) -> Operations:
    """Return the operations to store a layer as codes, if none stays dense.

    Args:
        shape: `(d_in, d_out)`.
        config: the settings.
        is_table: whether it is a token embedding or head, which are not entropy coded.
    """
    if config.code_choices.blocks:
        return (
            _BLOCKS if config.code_choices.blocks == BLOCK_TYPES and _has_large_blocks(shape) else _SMALL_BLOCKS
        ).of(shape)
    return (_ENTROPY if config.entropy_codes and not is_table else _FIXED).of(shape)


def _has_large_blocks(shape: Shape) -> bool:
    """Return whether a layer may have the block types whose groups have scales of few bits, which take longest."""
    return len(block_types_for(shape[0])) == len(BLOCK_TYPES)
