"""llama.cpp, and what is built on it: Ollama, LM Studio. It reads GGUF files, in which every tensor has its own type.

References:
    llama.cpp, `ggml/src/ggml-common.h` (block types) and `gguf-py/gguf/constants.py` (architectures).
"""

from rocket_core.code_format import CodeChoices
from rocket_core.engines.engine import Engine

LLAMA_CPP = Engine(
    name="llama.cpp",
    title="llama.cpp",
    exports=("gguf",),
    readable=("gguf", "dense"),
    kinds=("quantized",),
    codes=CodeChoices(bits=(), group_sizes=(), alone=True, blocks=True),
    tables=True,
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
    ),
)
