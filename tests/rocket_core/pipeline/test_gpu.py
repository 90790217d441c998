"""The same runs on an accelerator as on the CPU: `make test-gpu`, and `test_simulated_device.py`."""

import json

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from rocket_core.config import CalibrationConfig, healing_config
from rocket_core.estimates.footprint import HEADROOM
from rocket_core.hf import attach_factors
from rocket_core.pipeline import compress, heal, requirements
from rocket_core.speed import find_subject
from rocket_core.speed.messages import Load, Measure
from rocket_core.speed.transformers_runtime import TransformersModel
from tests.reference.factored_models import quantized_factors
from tests.reference.tiny_mixtures import save_tiny_mixture
from tests.reference.tiny_models import (
    FAMILIES,
    OTHER_FAMILIES,
    VOCAB_SIZE,
    byte_tokenizer,
    save_tiny_model,
    tiny_inputs,
)
from tests.reference.tiny_speech import save_tiny_speech
from tests.reference.tiny_vision import save_tiny_processor, save_tiny_vision, stand_in_for_libraries
from tests.sampling import sweep

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")

# Half of a tiny model, or three layers, which shows as much as all of it.
BLOCK = {"ignore": ("*.1.*",)}
MLP = {"ignore": ("*.1.*", "*.self_attn.*")}
FAST = {"preset": "fast", "sensitivity_samples": 4}
BYTES = FAST | MLP | {"ratio": None, "bits": 4.0}
QUALITY = {"samples": 4, "sequence_length": 32}
CASES = {
    "fast": FAST,
    "best": FAST | BLOCK | {"preset": "best"},
    "max": FAST | MLP | {"preset": "max"},
    "rocket-uniform": {"method": "rocket-uniform"},
    "svd-llm": {"method": "svd-llm"},
    "cospadi": {"method": "cospadi", "ignore": (*MLP["ignore"], "*.gate_proj", "*.up_proj")},
    "magnitude": {"method": "magnitude"},
    "wanda": {"method": "wanda"},
    "sparsegpt": {"method": "sparsegpt"},
    "rtn": {"method": "rtn", "ratio": None},
    "gptq": {"method": "gptq", "ratio": None},
    "low_rank": FAST | BLOCK | {"kinds": ("low_rank",)},
    "factored": FAST | BLOCK | {"kinds": ("factored",)},
    "shared": FAST | BLOCK | {"kinds": ("shared",)},
    "sparse": FAST | BLOCK | {"kinds": ("sparse",)},
    "quantized": BYTES | {"kinds": ("quantized",), "code_bits": (3, 4, 5), "group_size": (8, 0)},
    "entropy_coded": BYTES | {"kinds": ("entropy_coded",)},
    "factors of codes": BYTES | {"kinds": ("low_rank", "quantized"), "bits": 2.5, "include": ()},
    "memory": BYTES | {"storage": "memory", "kinds": ("quantized", "sparse"), "include": ()},
    "weight": BLOCK | {"objective": "weight"},
    "other measures": MLP | {"objective": "weight", "metric": "cosine", "sparsification": "global"},
    "whitened": BLOCK | {"objective": "whitened"},
    "values of 4 bits": FAST | BLOCK | {"kinds": ("low_rank", "factored", "sparse"), "value_bits": 4},
    "embeddings": BYTES | {"kinds": ("quantized",), "include": ("embeddings",), "code_bits": 4, "bits": 5.0},
    "calibrated twice": FAST | BLOCK | {"statistics_quota_bytes": 0, "kinds": ("factored",)},
    "float16": FAST | BLOCK | {"dtype": "float16", "kinds": ("factored", "sparse")},
    "vllm": BYTES | {"engine": "vllm", "bits": 6.0, "dtype": "bfloat16", "export": ("compressed-tensors", "dense")},
    "llama.cpp": BYTES | {"engine": "llama.cpp", "bits": 15.0, "export": ("gguf", "dense")},
}
# What these show, others show as well.
REPEATING = ["calibrated twice", "factored", "float16", "fast", "memory", "low_rank", "other measures", "weight"]
# On the CPU these run in float32.
IN_HALF_PRECISION = {"float16", "vllm"}
OTHERS = {
    **dict.fromkeys(OTHER_FAMILIES, save_tiny_model),
    **dict.fromkeys(["mixtral", "gpt_oss", "deepseek_v3", "llama4"], save_tiny_mixture),
    **dict.fromkeys(["qwen3_vl", "gemma3"], save_tiny_vision),
    **dict.fromkeys(["qwen2_audio"], save_tiny_speech),
}
DECODERS = ["llama", "gpt2", "gemma", "falcon"]
KEPT = ["bert", "vit", "t5", "mixtral", "gemma3"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Return complete checkpoints of mixtures and of models that read more than text, made once."""
    stand_in_for_libraries()
    made = {}

    def make(save, family):
        if family not in made:
            made[family] = save(family, tmp_path_factory.mktemp("models") / family)
        return made[family]

    return make


@pytest.fixture
def both(accelerator, tmp_path):
    """Compress on the CPU and on the accelerator, and compare reports, weights and what they compute."""

    def run(model, config, *, half=False):
        # Attention with the same formula: sums in another order can change which of two nearly equal numbers is kept,
        # and such choices compound, with `best` to a tenth of the outputs.
        strict = accelerator.type == "sim" and not half
        reports = {}
        for device in (CPU, accelerator):
            chosen = config.model_copy(update={"device": device.type})
            with sdpa_kernel(SDPBackend.MATH):
                reports[device] = compress(str(model), tmp_path / device.type, chosen)
        # In half precision most codes of these small layers differ, and their errors are only equal on average.
        assert_alike(*reports.values(), 1e-3 if strict else 0.15 if half else 0.05)
        for kind in set(config.export) & {"rocket", "dense"}:
            found = outputs(tmp_path / accelerator.type / kind, CPU)
            expected = outputs(tmp_path / CPU.type / kind, CPU)
            if float((found - expected).norm()) > (1e-3 if strict else 0.2) * float(expected.norm()):
                # Two roundings to few bits that are equally good are as far from each other as from the original.
                dense = outputs(model, CPU)
                assert not strict
                assert float((found - dense).norm()) <= 1.2 * float((expected - dense).norm())
            there = outputs(tmp_path / accelerator.type / kind, accelerator)
            torch.testing.assert_close(there, found, rtol=0.2 if half else 1e-3, atol=0.2 if half else 1e-3)
        return reports[CPU], reports[accelerator]

    return run


def assert_alike(cpu, device, rel):
    assert [layer.name for layer in device.layers] == [layer.name for layer in cpu.layers]
    assert device.totals.kept_parameters == pytest.approx(cpu.totals.kept_parameters, rel=0.01)
    if cpu.allocation is not None:
        assert device.allocation.total_error == pytest.approx(cpu.allocation.total_error, rel=rel)
    assert all(stage.peak_device_bytes for stage in device.stages if stage.name == "calibrating")
    assert not any(stage.peak_device_bytes for stage in cpu.stages)


@torch.no_grad()
def outputs(folder, device):
    """Return what the model computes on a device, to which it is loaded with `device_map`."""
    named = AutoConfig.from_pretrained(folder).architectures[0]
    model = getattr(transformers, named).from_pretrained(folder, device_map=device.type, dtype="auto")
    assert {parameter.device.type for parameter in model.parameters()} == {device.type}
    return model(**{name: tensor.to(device) for name, tensor in tiny_inputs(model).items()})[0].float().cpu()


@pytest.mark.parametrize("family", sweep(DECODERS, soak=[family for family in FAMILIES if family not in DECODERS]))
def test_a_decoder_gives_the_same_result(family, both, model_folder, settings):
    _, report = both(model_folder(family), settings(precision="float64", **BLOCK))
    assert report.totals.kept_parameters <= report.allocation.budget


@pytest.mark.parametrize("case", sweep([case for case in CASES if case not in REPEATING], soak=REPEATING))
def test_every_setting_gives_the_same_result(case, both, model_folder, settings):
    both(model_folder("llama"), settings(**CASES[case]), half=case in IN_HALF_PRECISION)


@pytest.mark.parametrize("family", sweep(KEPT, soak=[family for family in OTHERS if family not in KEPT]))
def test_every_kind_of_model_gives_the_same_result(family, both, checkpoint, settings):
    config = settings(**FAST, kinds=("factored",), ignore=("*.1.*", "*.2.*") if family == "t5" else ("*.1.*",))
    if family in OTHER_FAMILIES and OTHER_FAMILIES[family]().main_input_name != "input_ids":
        config = config.model_copy(update={"calibration": CalibrationConfig(dataset="synthetic", samples=4)})
    both(checkpoint(OTHERS[family], family), config)


@pytest.mark.parametrize("preset", sweep(["best"], soak=["max"]))
def test_experts_are_compressed_alike(preset, both, checkpoint, settings):
    ignored = ("*.1.*", "*.self_attn.*", "*.experts.[23].*")
    both(checkpoint(save_tiny_mixture, "mixtral"), settings(**FAST | {"preset": preset}, ignore=ignored))


def test_a_vision_tower_is_compressed_alike(both, checkpoint, settings, tmp_path):
    lines = []
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 255, (32 + number, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        lines.append(json.dumps({"image": f"{number}.png", "text": f"picture {number}"}))
    (tmp_path / "captions.jsonl").write_text("\n".join(lines))
    model = save_tiny_processor("qwen3_vl", checkpoint(save_tiny_vision, "qwen3_vl"))
    ignored = ("*.1.*", "*.mlp.*")
    calibration = {"dataset": str(tmp_path / "captions.jsonl"), "samples": 4, "sequence_length": 48}
    both(model, settings(**FAST, kinds=("factored",), include=("vision",), calibration=calibration, ignore=ignored))


def test_healing_gives_the_same_result(both, model_folder, settings, text, tmp_path, accelerator):
    model = model_folder("llama")
    both(model, settings(**FAST, **BLOCK, heal_tokens=2048), half=True)
    reports = []
    for device in (CPU.type, accelerator.type):
        config = healing_config(tokens=1024, dataset=str(text), sequence_length=32, device=device)
        reports.append(heal(tmp_path / CPU.type, tmp_path / f"healed-{device}", config, model=str(model)))
    cpu, gpu = reports
    # Accelerators train in bfloat16.
    assert gpu.divergence_before == pytest.approx(cpu.divergence_before, rel=0.05)
    assert gpu.divergence_after == pytest.approx(cpu.divergence_after, rel=0.1)


def test_evaluations_give_the_same_result(both, model_folder, settings, tmp_path, accelerator):
    task = tmp_path / "quiz.jsonl"
    task.write_text(json.dumps({"context": "a", "choices": [" b", " c"], "gold": 0}) + "\n")
    evaluate = QUALITY | {"tasks": (str(task),), "prompts": ("the rocket",), "answer_tokens": 4}
    cpu, device = both(model_folder("llama"), settings(**MLP, evaluate=evaluate))
    for name in ("before", "after"):
        expected, found = getattr(cpu.evaluation, name), getattr(device.evaluation, name)
        # A GPU may have chosen other entries of nearly equal worth; see `both`.
        same = name == "before" or accelerator.type == "sim"
        assert found.perplexity == pytest.approx(expected.perplexity, rel=1e-2 if same else 0.2)
        assert found.tasks[0].value == expected.tasks[0].value or not same


@pytest.mark.parametrize("packing", ["packed", "unpacked"])
def test_generation_is_timed_on_the_accelerator(packing, accelerator, tmp_path):
    model = FAMILIES["llama"]()
    attach_factors(model, quantized_factors(model))
    model.save_pretrained(tmp_path / "artifact")
    byte_tokenizer().save_pretrained(tmp_path / "artifact")
    subject = find_subject(tmp_path / "artifact", "artifact", packing=packing)
    runtime = TransformersModel(Load(subject=subject, threads=1, context=8, device=accelerator.type))
    assert runtime.device_bytes() >= runtime.weights_bytes() > 0
    times = runtime.measure(Measure(prompt=(3, 4, 5), new_tokens=3))
    assert times.generation_seconds > 0


def test_peak_memory_is_that_of_the_estimate(accelerator, settings, tmp_path, monkeypatch):
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 1, "num_attention_heads": 8}
    config = LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=VOCAB_SIZE, max_position_embeddings=512)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    estimates, estimate = [], requirements.estimate_footprint
    monkeypatch.setattr(
        requirements, "estimate_footprint", lambda *sizes: estimates.append(estimate(*sizes)) or estimates[-1]
    )
    calibration = {"samples": 24, "sequence_length": 256}
    config = settings(calibration=calibration, device=accelerator.type, ignore=("*.mlp.gate_proj", "*.mlp.up_proj"))

    report = compress(str(tmp_path / "model"), tmp_path / "out", config)

    peak = max(stage.peak_device_bytes for stage in report.stages)
    counted = estimates[0].memory_bytes - HEADROOM
    # Libraries of a GPU take workspaces, 32 MiB for products on an H100, which belong to the headroom.
    workspaces = 0 if accelerator.type == "sim" else HEADROOM
    assert 0.85 * counted <= peak <= 1.15 * counted + workspaces
