"""vLLM, which reads `pack-quantized` files of compressed-tensors.

References:
    vLLM, `model_executor/layers/quantization/compressed_tensors/compressed_tensors.py` (`get_scheme`: one scheme for
    each fused layer) and `schemes/compressed_tensors_wNa16.py` (bits, groups and their divisibility).
"""

from rocket_core.code_format import CodeChoices
from rocket_core.engines.engine import Engine

VLLM = Engine(
    name="vllm",
    title="vLLM",
    exports=("compressed-tensors",),
    readable=("compressed-tensors", "factored", "dense"),
    kinds=("quantized",),
    # No kernel is made for 2 bits. Codes of 3, 5, 6 and 7 bits changed their order with compressed-tensors 0.18.
    codes=CodeChoices(bits=(4, 8), group_sizes=(32, 64, 128, 0), alone=True, aligned=True),
    # It fuses the projections to queries, keys and values, and those to gate and up.
    one_format_per_input=True,
    # It holds a block's experts in one layer with one scheme (`CompressedTensorsMoEMethod.get_moe_method`), and
    # `transformers`, which must read the files as well, knows one scheme for all experts (`get_experts_scheme`).
    experts_agree="model",
    mixtures=("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM"),
    exact=("shared_expert_gate",),
    # weight_shape
    layer_bytes=16,
    # Not GPT2LMHeadModel and the like, whose weights are stored transposed.
    classes=("ForCausalLM",),
    sixteen_bits=True,
)
