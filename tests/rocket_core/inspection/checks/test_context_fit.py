"""A memory becomes the size that it leaves for the weights."""

import pytest

from rocket_core.config import CompressionConfig, compression_config
from rocket_core.errors import InfeasibleBudgetError, InvalidConfigError, UnsupportedArchitectureError
from rocket_core.inspection.checks.context_fit import fitted
from rocket_core.sizes.context_shape import context_shape
from rocket_core.sizes.engine_memory import allowance_bytes, cache_bytes
from rocket_core.sizes.memory_fit import FittedMemory, MemoryFit
from rocket_core.sizes.reachability import Reach
from rocket_core.sizes.target import ByBytes

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
}
FIT = {"memory_bytes": 10**8, "context": 4000}


def asking(engine="llama.cpp", **fit):
    return compression_config(fit=FIT | fit, engine=engine)


@pytest.mark.parametrize("engine", ["llama.cpp", "vllm", "vllm-fp8", "rocket"])
def test_the_rest_of_the_memory_is_the_target(engine):
    config = fitted(asking(engine), LLAMA, 2, "it")
    shape, asked = context_shape(LLAMA), MemoryFit(**FIT)
    runtime = engine.removesuffix("-fp8")
    taken = cache_bytes(shape, asked, runtime, 2) + allowance_bytes(shape, asked, runtime, 2)
    assert 0 < taken < 10**8
    assert config.target == ByBytes(target_bytes=10**8 - taken, fit=config.fit)
    assert (config.budget, config.target_bytes, asking(engine).target) == ("bytes", None, ByBytes(target_bytes=10**8))
    assert fitted(config, LLAMA, 2, "it") is config
    assert CompressionConfig.model_validate_json(config.model_dump_json()) == config


def test_a_longer_context_leaves_less():
    less = ({"context": 500}, {}, {"batch": 3})
    sizes = [fitted(asking(**more), LLAMA, 2, "it").target.target_bytes for more in less]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3
    assert fitted(asking(kv_bits=8), LLAMA, 2, "it").target.target_bytes > sizes[1]


def test_other_targets_stay_as_they_are():
    config = compression_config(target_bytes=10**6)
    assert fitted(config, {}, 2, "it") is config


def test_the_rows_add_up():
    fit = FittedMemory(**FIT, cache_bytes=30, engine_bytes=12)
    assert dict(fit.parts("vLLM", 100)) == {
        "weights": 100,
        "keys and values of 4,000 tokens": 30,
        "allowance for vLLM": 12,
        "total": 142,
        "asked for": 10**8,
    }
    assert fit.weights_bytes == 10**8 - 42
    assert fit.model_copy(update={"batch": 4}).tokens_text == "4 times 4,000 tokens"


@pytest.mark.parametrize(
    ("fit", "settings", "error", "message"),
    [
        ({"context": 4097}, {}, InvalidConfigError, "a context of 4,097 tokens is longer than the 4,096 that it"),
        (
            {"memory_bytes": 10**6},
            {},
            InvalidConfigError,
            r"1MB leave nothing for weights: keys and values of 4,000 tokens take 3\.145728MB, and llama.cpp 5\.\d+MB; "
            "lower context, batch or kv_bits, or give more memory",
        ),
        ({}, {"model_type": "rwkv"}, UnsupportedArchitectureError, "of type rwkv needs for a context is not known"),
    ],
)
def test_what_cannot_fit_is_refused(fit, settings, error, message):
    with pytest.raises(error, match=message):
        fitted(asking(**fit), LLAMA | settings, 2, "it")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 0}, "fit.context: Input should be greater than or equal to 1"),
        ({"batch": 0}, "fit.batch: Input should be greater than or equal to 1"),
        ({"kv_bits": 5}, "fit.kv_bits: Input should be 4, 8 or 16$"),
        ({"memory_bytes": 0}, "fit.memory_bytes: Input should be greater"),
        ({"contxt": 1}, "fit.contxt: Extra inputs are not permitted$"),
    ],
)
def test_nonsense_is_refused(changes, message):
    with pytest.raises(InvalidConfigError, match=message):
        asking(**changes)


def test_a_fit_needs_the_files_of_its_engine():
    with pytest.raises(InvalidConfigError, match="fit gives a size of the gguf artifact; export that"):
        compression_config(fit=FIT, engine="llama.cpp", export=("dense",))
    with pytest.raises(InvalidConfigError, match="only one of ratio, target_bytes, bits, fit"):
        compression_config(fit=FIT, target_bytes=10**6)


def test_refusals_of_the_size_say_what_the_context_takes():
    fit = FittedMemory(memory_bytes=2_000_000, context=300, batch=2, cache_bytes=900_000, engine_bytes=700_000)
    sizes = {"dense": 900_000, "smallest": 500_000, "certain": 500_000, "other_bytes": 10_000}
    reach = Reach(unit="bytes", parameters=450_000, **sizes)
    with pytest.raises(InfeasibleBudgetError) as caught:
        reach.check(ByBytes(target_bytes=fit.weights_bytes, fit=fit))
    said = "It is what 2MB of memory leave: keys and values of 2 times 300 tokens take 900kB, and the engine 700kB"
    assert said in str(caught.value)
    assert "400kB is out of reach" in str(caught.value)
    more = fit.model_copy(update={"memory_bytes": 4_000_000})
    with pytest.raises(InvalidConfigError, match=r"takes 910kB as it is, and 4MB of memory leave 2\.4MB with 2 times"):
        reach.check_needed(ByBytes(target_bytes=more.weights_bytes, fit=more))
