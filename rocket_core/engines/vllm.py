"""vLLM, which reads `pack-quantized` files of compressed-tensors.

References:
    vLLM, `model_executor/layers/quantization/compressed_tensors/compressed_tensors.py` (`get_scheme`: one scheme for
    each fused layer) and `schemes/compressed_tensors_wNa16.py` (bits, groups and their divisibility).
"""

from functools import cache
from types import MappingProxyType

from rocket_core.code_format import CodeBits, CodeFormat
from rocket_core.engines.engine import Engine

# 2 bits have the same bytes in every version as well, but no kernel is made for them; 3, 5, 6 and 7 bits changed theirs
# with compressed-tensors 0.18.
_BITS: tuple[CodeBits, ...] = (4, 8)
_GROUPS = (32, 64, 128)
# Codes are packed into words of 32 bits, row by row.
_WORD_BITS = 32


@cache
def _formats(d_in: int) -> tuple[CodeFormat, ...]:
    groups = [size for size in _GROUPS if d_in % size == 0 and size < d_in]
    return tuple(
        CodeFormat(bits=bits, group_size=size, scale_bits=16, bfloat16_scales=True)
        for bits in _BITS
        for size in [*groups, d_in]
        if d_in * bits % _WORD_BITS == 0
    )


VLLM = Engine(
    name="vllm",
    title="vLLM",
    exports=("compressed-tensors",),
    readable=("compressed-tensors", "factored", "dense"),
    kinds=("quantized",),
    formats=_formats,
    bfloat16_scales=True,
    # It fuses the projections to queries, keys and values, and those to gate and up.
    one_format_per_input=True,
    # weight_shape
    layer_bytes=16,
    classes=("ForCausalLM",),
    refused_families=MappingProxyType({"gpt2": "their weights are stored transposed"}),
)
