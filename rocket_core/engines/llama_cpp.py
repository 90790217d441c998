"""llama.cpp, and what is built on it: Ollama, LM Studio. It reads GGUF files, in which every tensor has its own type.

References:
    llama.cpp, `ggml/src/ggml-common.h` (block types) and `gguf-py/gguf/constants.py` (architectures).
"""

from rocket_core.code_format import CodeChoices
from rocket_core.engines.engine import Engine

_MIXTURES = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM")

LLAMA_CPP = Engine(
    name="llama.cpp",
    title="llama.cpp",
    exports=("gguf",),
    readable=("gguf", "dense"),
    kinds=("quantized",),
    codes=CodeChoices(bits=(), group_sizes=(), alone=True, blocks=True),
    tables=True,
    # Each of these is one tensor.
    experts_agree="projection",
    mixtures=_MIXTURES,
    # A vector that llama.cpp's own files have in float32.
    exact=("shared_expert_gate",),
    # Those that `rocket_core.exports.gguf_families` can write.
    classes=(
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Phi3ForCausalLM",
        *_MIXTURES,
    ),
)
