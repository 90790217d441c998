"""Engines that compressed models are made for: what each reads, which restricts candidates and decides the exports.

References:
    vLLM, `model_executor/layers/quantization/compressed_tensors/compressed_tensors.py` (`get_scheme`: one scheme for
    each fused layer) and `schemes/compressed_tensors_wNa16.py` (bits, groups and their divisibility).
    mlx-lm, `utils.py` (`load_model`: which layers are quantized, and how) and `models/` (families).
    onnxruntime-genai, `models/loaders/olive.py` and `models/builder.py` (families). ONNX Runtime,
        `contrib_ops/cpu/quantization/matmul_nbits.cc`: 2, 4 or 8 bits, groups of a power of two of at least 16.
    llama.cpp, `ggml/src/ggml-common.h` (block types) and `gguf-py/gguf/constants.py` (architectures).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator

from rocket_core.sizes.block_types import BLOCK_TYPES, MLX_TYPES
from rocket_core.sizes.code_format import ANY_CODES, CodeChoices

EngineName = Literal["rocket", "vllm", "vllm-int8", "vllm-fp8", "vllm-nvfp4", "llama.cpp", "mlx", "onnx"]
ExportKind = Literal["rocket", "dense", "compressed-tensors", "gguf", "mlx", "olive"]
LaterExport = Literal["dense", "gguf", "compressed-tensors"]
"""Exports that can be made from a finished `rocket` one."""


def current_name(name: object) -> object:
    """Return the name of an export, or of a file in its folder, as it is today: `rocket` was `factored` until 0.1."""
    old = "factored"
    return f"rocket{name.removeprefix(old)}" if isinstance(name, str) and name.partition("/")[0] == old else name


NamedExport = Annotated[ExportKind, BeforeValidator(current_name)]
"""An export as requests and reports of earlier versions may name it."""
Kind = Literal["low_rank", "factored", "shared", "sparse", "quantized", "entropy_coded"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """An engine that runs compressed models.

    Attributes:
        name: value of the option `engine`.
        title: its name as people write it.
        exports: the exports that it is offered by default; the first is the one whose size a target in bytes limits.
        readable: every export that may be asked for.
        kinds: ways to store a layer that it reads.
        codes: the formats of integer codes that it reads.
        one_format_per_input: whether all layers that read the same input must be stored in the same way, because the
            engine fuses them.
        quantizes_all: whether no linear layer of a block may stay dense.
        experts_agree: which layers of experts must be stored in the same way: those of a `projection` (gate, up or
            down) of a block, or all of the `model`; None for none.
        mixtures: classes of mixtures of experts among `classes`.
        exact: last parts of the names of layers that it reads as they are.
        tables: whether it reads a quantized token embedding and head.
        layer_bytes: bytes that a quantized layer takes in its file in addition to codes and scales.
        classes: model classes that it runs, or their endings.
        sixteen_bits: whether the model must be stored in 16 bits.
    """

    name: EngineName
    title: str
    exports: tuple[ExportKind, ...]
    readable: tuple[ExportKind, ...]
    kinds: tuple[Kind, ...]
    codes: CodeChoices
    one_format_per_input: bool = False
    quantizes_all: bool = False
    experts_agree: Literal["projection", "model"] | None = None
    mixtures: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    tables: bool = False
    layer_bytes: int = 0
    classes: tuple[str, ...] = ()
    sixteen_bits: bool = False

    @property
    def runtime(self) -> str:
        """The program that runs its files, which some engines share: their names have a format after a hyphen."""
        return self.name.partition("-")[0]


_DENSE_FAMILIES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
)
_VISION = (
    "Gemma3ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
)
_MIXTURES = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM")

ROCKET = Engine(
    name="rocket",
    title="Transformers (Rocket)",
    exports=("rocket",),
    readable=("rocket", "dense"),
    kinds=get_args(Kind),
    codes=ANY_CODES,
    tables=True,
)
"""This library with `transformers`, which reads every kind."""

VLLM = Engine(
    name="vllm",
    title="vLLM",
    exports=("compressed-tensors",),
    readable=("compressed-tensors", "rocket", "dense"),
    kinds=("quantized",),
    # No kernel is made for 2 bits. Codes of 3, 5, 6 and 7 bits changed their order with compressed-tensors 0.18.
    codes=CodeChoices(bits=(4, 8), group_sizes=(32, 64, 128, 0), alone=True, aligned=True),
    # It fuses the projections to queries, keys and values, and those to gate and up.
    one_format_per_input=True,
    # It holds a block's experts in one layer with one scheme (`CompressedTensorsMoEMethod.get_moe_method`), and
    # `transformers`, which must read the files as well, knows one scheme for all experts (`get_experts_scheme`).
    experts_agree="model",
    mixtures=_MIXTURES,
    exact=("shared_expert_gate",),
    # weight_shape
    layer_bytes=16,
    # Not GPT2LMHeadModel and the like, whose weights are stored transposed.
    classes=("ForCausalLM",),
    sixteen_bits=True,
)
"""vLLM, which reads `pack-quantized` files of compressed-tensors."""

VLLM_INT8 = replace(
    VLLM,
    name="vllm-int8",
    title="vLLM (INT8)",
    codes=CodeChoices(bits=(), group_sizes=(), alone=True, blocks=("INT8",)),
    experts_agree=None,
    mixtures=(),
    layer_bytes=0,
)
"""vLLM with INT8 weights and inputs (`int-quantized`), which CPUs and GPUs from Turing to Hopper multiply."""

VLLM_FP8 = replace(
    VLLM_INT8,
    name="vllm-fp8",
    title="vLLM (FP8)",
    codes=CodeChoices(bits=(), group_sizes=(), alone=True, blocks=("FP8",)),
    # Its dtype has a longer name in the header than others.
    layer_bytes=3,
)
"""vLLM with FP8 weights and inputs (`float-quantized`), which GPUs from Ada and Hopper on multiply."""

VLLM_NVFP4 = replace(
    VLLM_FP8,
    name="vllm-nvfp4",
    title="vLLM (NVFP4)",
    codes=CodeChoices(bits=(), group_sizes=(), alone=True, blocks=("FP8", "NVFP4")),
    # weight_global_scale, and the name.
    layer_bytes=7,
)
"""vLLM with layers of NVFP4 weights (`nvfp4-pack-quantized`) as well."""

LLAMA_CPP = Engine(
    name="llama.cpp",
    title="llama.cpp",
    exports=("gguf",),
    readable=("gguf", "dense"),
    kinds=("quantized",),
    codes=CodeChoices(bits=(), group_sizes=(), alone=True, blocks=BLOCK_TYPES),
    tables=True,
    # Each of these is one tensor.
    experts_agree="projection",
    mixtures=(*_MIXTURES, "GptOssForCausalLM"),
    # A vector that llama.cpp's own files have in float32.
    exact=("shared_expert_gate",),
    # Those that `rocket_core.exports.gguf_families` and `gguf_projector` can write.
    classes=(*_DENSE_FAMILIES, *_MIXTURES, "GptOssForCausalLM", *_VISION),
)
"""llama.cpp, and what is built on it: Ollama, LM Studio. In its GGUF files every tensor has its own type."""

MLX = Engine(
    name="mlx",
    title="MLX",
    exports=("mlx",),
    readable=("mlx", "rocket", "dense"),
    kinds=("quantized",),
    codes=CodeChoices(bits=(), group_sizes=(), alone=True, blocks=MLX_TYPES),
    tables=True,
    classes=_DENSE_FAMILIES,
    # MLX computes in the dtype of the scales, which is bfloat16.
    sixteen_bits=True,
)
"""MLX with mlx-lm, on Apple's GPUs. Every layer has its own bits and size of groups."""

ONNX = Engine(
    name="onnx",
    title="ONNX Runtime",
    exports=("olive",),
    readable=("olive", "rocket", "dense"),
    kinds=("quantized",),
    codes=CodeChoices(bits=(2, 4, 8), group_sizes=(32, 64, 128), alone=True, aligned=True),
    # The model builder reads no other layers next to layers of codes.
    quantizes_all=True,
    # Those whose logits agree. For others the builder stops, or its graph computes something else from layers of codes.
    classes=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM"),
    sixteen_bits=True,
)
"""ONNX Runtime GenAI, whose model builder reads checkpoints of Olive. Every layer has its own bits and groups."""

PUSHED_FIRST: tuple[ExportKind, ...] = ("rocket", "gguf", "mlx", "compressed-tensors", "olive", "dense")
"""Exports by precedence: without a choice, the first that a job has is pushed to the Hub."""
ENGINES: Mapping[EngineName, Engine] = MappingProxyType(
    {engine.name: engine for engine in (ROCKET, VLLM, VLLM_INT8, VLLM_FP8, VLLM_NVFP4, LLAMA_CPP, MLX, ONNX)}
)
