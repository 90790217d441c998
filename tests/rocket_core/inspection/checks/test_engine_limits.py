import pytest

from rocket_core.config import compression_config
from rocket_core.errors import InvalidConfigError, UnsupportedArchitectureError
from rocket_core.inspection.checks.engine_limits import check_engine

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
CONFIG = compression_config(engine="vllm", bits=5)


def test_a_language_model_in_16_bits_runs():
    check_engine(LLAMA, 2, CONFIG.reader, "local/x")


@pytest.mark.parametrize("architectures", [["BertForMaskedLM"], ["LlamaModel"], ["GPT2LMHeadModel"]])
def test_other_classes_are_refused_with_a_remedy(architectures):
    with pytest.raises(
        UnsupportedArchitectureError,
        match=r"For vLLM, Rocket writes models whose class .* ForCausalLM; use the engine rocket",
    ):
        check_engine({"model_type": "x", "architectures": architectures}, 2, CONFIG.reader, "local/x")


@pytest.mark.parametrize("architectures", [[], None, "LlamaModel", [3]])
def test_a_model_that_names_no_class_is_left_to_the_run(architectures):
    check_engine({"model_type": "x", "architectures": architectures}, 2, CONFIG.reader, "local/x")


def test_32_bits_are_refused_with_the_dtypes():
    with pytest.raises(InvalidConfigError, match="local/x is stored in 32; set dtype to bfloat16 or float16"):
        check_engine(LLAMA, 4, CONFIG.reader, "local/x")


@pytest.mark.parametrize(
    ("engine", "model", "count"),
    [
        ("vllm", {"architectures": ["GptOssForCausalLM"], "num_local_experts": 8}, 8),
        ("vllm", {"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 256}, 256),
        ("llama.cpp", {"architectures": ["Qwen3ForCausalLM"], "num_experts": 4}, 4),
    ],
)
def test_mixtures_are_refused_with_the_reason(engine, model, count):
    config = compression_config(engine=engine, bits=5)
    with pytest.raises(
        UnsupportedArchitectureError,
        match=rf"local/x is a mixture of {count} experts \(\w+\), .* those that it does are Mixtral.* engine rocket",
    ):
        check_engine(model, 2, config.reader, "local/x")
    check_engine(model, 2, compression_config(ratio=0.3).reader, "local/x")


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp"])
@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe"])
def test_known_mixtures_are_accepted(engine, family):
    model = {"architectures": [f"{family}ForCausalLM"], "num_experts": 8}
    check_engine(model, 2, compression_config(engine=engine, bits=5).reader, "local/x")


def test_one_expert_is_no_mixture():
    check_engine(LLAMA | {"num_experts": 1}, 2, CONFIG.reader, "local/x")


def test_the_engine_of_this_library_runs_everything():
    check_engine({}, 4, compression_config(ratio=0.3).reader, "local/x")
