"""What engines take for a context, next to what llama.cpp allocates and transformers holds at its peak."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from rocket_core.config import compression_config
from rocket_core.errors import InvalidConfigError
from rocket_core.pipeline import compress
from rocket_core.sizes.context_shape import context_shape
from rocket_core.sizes.engine_memory import allowance_bytes, cache_bytes
from rocket_core.sizes.memory_fit import MemoryFit
from tests.reference import gguf_models
from tests.reference.llama_cpp import allocated

GEMMA = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 7, "num_attention_heads": 2}
GEMMA |= {"num_key_value_heads": 1, "head_dim": 32, "sliding_window": 100, "vocab_size": 300, "intermediate_size": 96}


WIDE = {"max_position_embeddings": 8192, "head_dim": 32}


def asked(context, **more):
    return MemoryFit(memory_bytes=10**9, context=context, **more)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    def make(family):
        model, output = (tmp_path_factory.mktemp(name) for name in ("model", "out"))
        gguf_models.save(family, model, **WIDE)
        compress(str(model), output, compression_config(ratio=0.4, engine="llama.cpp", preset="instant"))
        return output / "gguf" / "model.gguf"

    return make


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "qwen3"])
def test_llama_cpp_allocates_what_is_counted(gguf_file, family):
    file = gguf_file(family)
    shape = context_shape(gguf_models.build(family, **WIDE).config.to_dict())
    for fit in (asked(4000), asked(700, batch=3), asked(4000, kv_bits=8), asked(2000, kv_bits=4)):
        cache, buffers = allocated(file, fit.context, fit.batch, {8: "Q8_0", 4: "Q4_0"}.get(fit.kv_bits, "F16"))
        # It prints hundredths of a MiB of each of two caches.
        assert cache == pytest.approx(cache_bytes(shape, fit, "llama.cpp", 4), abs=0.011 * 2**20)
        assert buffers < allowance_bytes(shape, fit, "llama.cpp", 4)


def test_llama_cpp_pads_and_keeps_a_window():
    shape = context_shape(GEMMA)
    # 1 of 7 layers keeps all, the others 100 and a batch of 512, in steps of 256.
    assert cache_bytes(shape, asked(8000), "llama.cpp", 2) == (8192 + 6 * 768) * 2 * 32 * 2
    assert cache_bytes(shape, asked(300), "llama.cpp", 2) == 7 * 512 * 2 * 32 * 2
    mistral = context_shape(GEMMA | {"model_type": "mistral"})
    assert (mistral.full_layers, mistral.window_layers) == (0, 7)
    assert cache_bytes(mistral, asked(8000), "llama.cpp", 2) == 7 * 8192 * 2 * 32 * 2


def test_vllm_keeps_blocks_of_tokens_and_groups_of_layers():
    llama = context_shape(GEMMA | {"model_type": "llama"})
    assert cache_bytes(llama, asked(1000), "vllm", 2) == 7 * 1008 * 2 * 32 * 2
    assert cache_bytes(llama, asked(1000, batch=3, kv_bits=8), "vllm", 2) == 3 * 7 * 1008 * 2 * 32
    # A window of 100, and the 2048 tokens that are computed at once, in blocks of 16 with one more.
    assert cache_bytes(context_shape(GEMMA), asked(8000), "vllm", 2) == (8000 + 6 * (2160 + 16)) * 2 * 32 * 2
    # 2 layers that keep all and 8 with a window are 5 groups of 2; 7 and 5 are two groups of 7.
    for full, windowed, kept in ((2, 8, 2 * 8000 + 8 * 2176), (2, 7, 2 * 8000 + 8 * 2176), (7, 5, 7 * (8000 + 2176))):
        types = ["full_attention"] * full + ["sliding_attention"] * windowed
        shape = context_shape(GEMMA | {"layer_types": types, "num_hidden_layers": len(types)})
        assert cache_bytes(shape, asked(8000), "vllm", 2) == kept * 2 * 32 * 2


def test_vllm_may_use_92_percent():
    shape, fit = context_shape(GEMMA), MemoryFit(memory_bytes=100 * 2**30, context=100)
    small = MemoryFit(memory_bytes=10 * 2**30, context=100)
    for one, tokens, sequences in ((fit, 8192, 1024), (small, 2048, 256)):
        computed = tokens * 2 * (3 * 96 + 5 * 64) + 3 * sequences * 300 * 4
        assert allowance_bytes(shape, one, "vllm", 2) == one.memory_bytes * 8 // 100 + computed


_SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
_LATENT |= {"qk_rope_head_dim": 8, "first_k_dense_replace": 2}
_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8, "num_experts": 2}


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("deepseek_v3", _LATENT),
        ("jamba", _JAMBA),
    ],
)
def test_transformers_takes_no_more_for_chunks_of_512(family, more):
    config = AutoConfig.for_model(family, **(_SMALL | more))
    model = AutoModelForCausalLM.from_config(config).bfloat16().eval()
    ids = torch.randint(3, 250, (1, 1536))

    def prefill():
        cache = None
        for chunk in ids.split(512, dim=1):
            cache = model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
        return cache

    with torch.no_grad():
        prefill()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            cache = prefill()
    peak, kept = _peak(profiler)
    del cache
    shape, fit = context_shape(config.to_dict()), asked(1536)
    assert kept == pytest.approx(cache_bytes(shape, fit, "rocket", 2), rel=0.01)
    allowed = allowance_bytes(shape, fit, "rocket", 2) - 8 * shape.largest - fit.memory_bytes // 20
    assert 0.3 * allowed < peak - kept <= allowed


def _peak(profiler):
    """Return the most bytes that were held while something was profiled, and those that still are."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak, held


@pytest.mark.parametrize(
    ("changes", "fit", "engine", "message"),
    [
        ({}, asked(100, kv_bits=4), "vllm", "vLLM keeps keys and values in 16 or 8 bits"),
        ({}, asked(100, kv_bits=8), "rocket", "in 16 bits; leave kv_bits out"),
        ({"head_dim": 24}, asked(100, kv_bits=8), "llama.cpp", "a multiple of 32 numbers, and those of .* have 24"),
        ({}, asked(100), "mlx", "what engine mlx takes in addition to the weights was not measured"),
        ({"model_type": "mamba", "state_size": 8, "expand": 2, "conv_kernel": 4}, asked(9), "vllm", "of the states of"),
        ({"model_type": "bart", "d_model": 64}, asked(9), "vllm", "vLLM runs no model of this type"),
    ],
)
def test_what_an_engine_lacks_is_refused(changes, fit, engine, message):
    with pytest.raises(InvalidConfigError, match=message):
        cache_bytes(context_shape(GEMMA | changes), fit, engine, 2)
