"""Mixtures of experts, from the checkpoint to the artifacts and back."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rocket_core.hf  # noqa: F401 (registers the format)
from rocket_core.checkpoint import find_model
from rocket_core.errors import CompressionCancelledError, UnsupportedArchitectureError
from rocket_core.experts import has_unfused, unfuse
from rocket_core.pipeline import compress
from rocket_core.pipeline.preflight import prepare_run
from tests.reference.observers import Watch
from tests.reference.tiny_mixtures import EXPERTS, MIXTURES, inputs, save_tiny_mixture
from tests.sampling import sweep

RATIO = 0.3
# One family of each way to store experts on disk.
KEPT = ["mixtral", "gpt_oss", "granitemoe", "dbrx", "llama4"]
FAMILIES = sweep(KEPT, soak=[family for family in MIXTURES if family not in KEPT])


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Return complete checkpoints of the tiny mixtures, made once."""
    made = {}

    def make(family):
        if family not in made:
            made[family] = save_tiny_mixture(family, tmp_path_factory.mktemp("mixtures") / family)
        return made[family]

    return make


@pytest.fixture(scope="module")
def compressed(tmp_path_factory, mixture, settings):
    """Return the output folder and the report of an uninterrupted run of a family."""
    made = {}

    def make(family):
        if family not in made:
            output = tmp_path_factory.mktemp("compressed") / family
            made[family] = output, compress(str(mixture(family)), output, settings(preset="fast"))
        return made[family]

    return make


@torch.no_grad()
def logits(model):
    return model(inputs()).logits


@pytest.mark.parametrize("family", FAMILIES)
class TestEveryFamily:
    def test_every_expert_is_compressed_within_the_budget(self, family, compressed):
        _, report = compressed(family)
        of_experts = [layer for layer in report.layers if ".experts." in layer.name]
        blocks = 2 if family not in ("deepseek_v2", "deepseek_v3", "glm4_moe") else 1
        assert len(of_experts) == 3 * EXPERTS * blocks
        assert not report.skipped
        used = sum(count > 0 for count in report.experts.values())
        assert f"reach {used} of {len(report.experts)} experts" in report.calibration_reach
        assert 10 <= report.calibration.reached_tokens <= report.calibration.vocabulary
        kept = sum(layer.kept_parameters for layer in report.layers)
        total = sum(layer.d_in * layer.d_out for layer in report.layers)
        assert kept <= report.allocation.budget <= (1 - RATIO) * total
        assert len([layer for layer in of_experts if layer.kind != "dense"]) >= len(of_experts) / 2

    def test_the_rocket_artifact_equals_the_dense_one(self, family, compressed, mixture):
        output, _ = compressed(family)
        stored, info = AutoModelForCausalLM.from_pretrained(output / "rocket", output_loading_info=True)
        assert not any(info.values())
        assert has_unfused(stored)
        dense = AutoModelForCausalLM.from_pretrained(output / "dense")
        assert not has_unfused(dense)
        torch.testing.assert_close(logits(stored), logits(dense), rtol=1e-3, atol=1e-3)
        original = AutoModelForCausalLM.from_pretrained(mixture(family))
        assert not torch.allclose(logits(stored), logits(original), atol=1e-2)
        tokens = [one.generate(inputs()[:1, :8], max_new_tokens=6, do_sample=False) for one in (stored, dense)]
        assert torch.equal(*tokens)

    def test_the_dense_export_has_the_original_layout(self, family, compressed, mixture):
        output, report = compressed(family)
        dense, source = (load_file(folder / "model.safetensors") for folder in (output / "dense", mixture(family)))
        shapes = {key: (value.shape, value.dtype) for key, value in source.items()}
        assert {key: (value.shape, value.dtype) for key, value in dense.items()} == shapes
        settings = [json.loads((folder / "config.json").read_text()) for folder in (output / "dense", mixture(family))]
        assert settings[0] == settings[1]
        parts = ("norm.weight", "norm_1.weight", "norm_2.weight", "norm_f.weight", "bias")
        untouched = [key for key in source if "router" in key or key.endswith(parts)]
        assert all(torch.equal(dense[key], source[key]) for key in untouched)
        assert report.totals.dense_bytes == sum(file.stat().st_size for file in mixture(family).glob("*.safetensors"))

    def test_dequantizing_equals_the_dense_export(self, family, compressed, tmp_path):
        output, _ = compressed(family)
        AutoModelForCausalLM.from_pretrained(output / "rocket").dequantize().save_pretrained(tmp_path)
        found, dense = (load_file(folder / "model.safetensors") for folder in (tmp_path, output / "dense"))
        assert found.keys() == dense.keys()
        assert all(torch.equal(value, dense[key]) for key, value in found.items())


@pytest.mark.parametrize("family", KEPT)
def test_the_artifact_takes_the_bytes_asked_for(family, mixture, settings, tmp_path):
    size = sum(file.stat().st_size for file in mixture(family).glob("*.safetensors")) * 6 // 10
    config = settings(preset="fast", ratio=None, target_bytes=size, export=("rocket",))
    report = compress(str(mixture(family)), tmp_path, config)
    files = sum(file.stat().st_size for file in (tmp_path / "rocket").glob("*.safetensors"))
    assert 0.97 * size <= files <= size
    assert report.exports[0].stored_bytes == files
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "rocket")
    assert torch.isfinite(logits(loaded)).all()


@pytest.mark.parametrize("family", sweep(["granitemoe"], soak=["mixtral", "gpt_oss", "llama4"]))
def test_a_stopped_run_ends_with_identical_bytes(family, tmp_path, mixture, settings, compressed, fingerprint):
    for stop in ("experts.2.up_proj", "layers.1."):
        seen = []
        with pytest.raises(CompressionCancelledError):
            compress(
                str(mixture(family)),
                tmp_path / "out",
                settings(preset="fast"),
                resume=True,
                observer=Watch(
                    on_progress=seen.append,
                    should_cancel=lambda: bool(seen) and stop in (seen[-1].layer or ""),  # noqa: B023
                ),
            )
    compress(str(mixture(family)), tmp_path / "out", settings(preset="fast"), resume=True)
    assert fingerprint(tmp_path / "out") == fingerprint(compressed(family)[0])


def test_ignored_experts_keep_their_weights(tmp_path, mixture, settings):
    config = settings(ignore=("*.experts.*",), export=("rocket", "dense"))
    report = compress(str(mixture("gpt_oss")), tmp_path, config)
    assert not [layer for layer in report.layers if ".experts." in layer.name]
    assert len(report.skipped) == 2 * 3 * EXPERTS
    source = load_file(mixture("gpt_oss") / "model.safetensors")
    for kind in ("rocket", "dense"):
        stored = load_file(tmp_path / kind / "model.safetensors")
        fused = [key for key in source if ".experts." in key]
        assert all(torch.equal(stored[key], source[key]) for key in fused)
        assert not has_unfused(AutoModelForCausalLM.from_pretrained(tmp_path / kind))


@pytest.fixture(scope="module")
def best(tmp_path_factory, mixture, settings):
    """Return the model, settings, output folder and report of a sequential run of a family."""
    made = {}

    def make(family):
        if family not in made:
            output = tmp_path_factory.mktemp("best") / family
            ignore = ("*.layers.0.*", "*.self_attn.*")
            config = settings(preset="best", kinds=("factored",), objective="whitened", ratio=0.5, ignore=ignore)
            made[family] = config, output, compress(str(mixture(family)), output, config)
        return made[family]

    return make


@pytest.mark.parametrize(
    "family", sweep(["qwen2_moe", "llama4"], soak=[name for name in MIXTURES if name not in ("qwen2_moe", "llama4")])
)
def test_experts_are_compressed_for_what_their_tokens_become(family, mixture, best):
    """Only experts of the last block change, so that its routers choose as before: errors can be computed outright."""
    config, output, report = best(family)
    run = prepare_run(find_model(str(mixture(family))), config)
    samples = run.inputs.draw(run.config.calibration)
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (mixture(family), output / "dense"))
    for model in (before, after):
        unfuse(model)
    seen = [outputs_of_experts(model, samples) for model in (before, after)]
    layers = [layer for layer in report.layers if layer.name in seen[0] and layer.kind != "dense"]
    assert layers
    for layer in layers:
        dense, compressed = (outputs[layer.name] for outputs in seen)
        assert dense.shape == compressed.shape
        # The block's average, which fills up what an expert has seen, is a part of the report's error.
        error = float((dense - compressed).norm() / dense.norm())
        assert layer.achieved_error == pytest.approx(error, rel=0.5)


@torch.no_grad()
def outputs_of_experts(model, samples):
    """Return what each layer of an expert returns for all tokens that the model routes to it."""
    found = {}
    for name, module in model.named_modules():
        if ".experts." in name and type(module) is torch.nn.Linear:
            module.register_forward_hook(lambda _m, _a, output, name=name: found.setdefault(name, []).append(output))
    for batch in samples.batches(4, torch.device("cpu"), torch.float32):
        model(**batch)
    return {name: torch.cat(outputs) for name, outputs in found.items()}


@pytest.mark.soak
def test_blocks_of_experts_are_refined(mixture, settings, tmp_path):
    config = settings(preset="max", kinds=("factored",), objective="whitened", ratio=0.5)
    report = compress(str(mixture("gpt_oss")), tmp_path, config)
    assert len(report.refinement) == 2
    assert all(block.error_after <= block.error_before for block in report.refinement)
    assert any(block.error_after < block.error_before for block in report.refinement)


@pytest.mark.parametrize("family", sweep(["qwen2_moe"], soak=["llama4"]))
def test_a_stopped_sequential_run_ends_with_identical_bytes(family, tmp_path, mixture, best, fingerprint):
    config, expected, _ = best(family)
    for stop in ("experts.2.gate_proj", "experts.1.down_proj"):
        seen = []
        with pytest.raises(CompressionCancelledError):
            compress(
                str(mixture(family)),
                tmp_path / "out",
                config,
                resume=True,
                observer=Watch(
                    on_progress=seen.append,
                    should_cancel=lambda: (
                        bool(seen) and seen[-1].stage == "factorizing" and stop in (seen[-1].layer or "")  # noqa: B023
                    ),
                ),
            )
    compress(str(mixture(family)), tmp_path / "out", config, resume=True)
    assert fingerprint(tmp_path / "out") == fingerprint(expected)


@pytest.mark.parametrize(
    ("engine", "family", "reason"),
    [
        ("vllm", "glm4_moe", r"a mixture of 4 experts \(Glm4MoeForCausalLM\), which Rocket does not write for vLLM"),
        ("llama.cpp", "deepseek_v3", r"is a DeepseekV3ForCausalLM\. For llama\.cpp, .* use the engine rocket"),
        ("vllm", "gpt_oss", r"a mixture of 4 experts \(GptOssForCausalLM\), which Rocket does not write for vLLM"),
    ],
)
def test_other_engines_are_refused_early(engine, family, reason, tmp_path, mixture, settings):
    config = settings(preset="fast", cap_slack=0.0, ratio=None, bits=5, engine=engine)
    with pytest.raises(UnsupportedArchitectureError, match=reason):
        compress(str(mixture(family)), tmp_path, config)


@pytest.mark.parametrize("family", KEPT)
def test_only_one_block_is_in_memory(family, mixture, settings):
    run = prepare_run(find_model(str(mixture(family))), settings())
    model, block = run.architecture.model, run.architecture.block_name(1)
    run.loader.load([block])
    held = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    assert held == [name for name, _ in model.named_parameters() if name.startswith(f"{block}.")]
    run.loader.unload(model.get_submodule(block))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_all_tokens_reach_all_experts_if_asked_to(tmp_path, mixture, settings):
    tokens, routed = {}, {}
    for everywhere in (False, True):
        found = []
        config = settings(preset="fast", export=("rocket",), calibrate_all_experts=everywhere)
        folder = tmp_path / str(everywhere)
        report = compress(
            str(mixture("mixtral")),
            folder,
            config,
            observer=Watch(on_profile=lambda _position, profile: found.append(profile)),  # noqa: B023
        )
        of_experts = [profile for profile in found if ".experts." in profile.name]
        tokens[everywhere] = {profile.tokens for profile in of_experts}
        routed[everywhere] = [profile.routed_tokens for profile in of_experts]
        modules = {profile.name.rpartition(".")[0] for profile in of_experts}
        assert report.experts.keys() == (set() if everywhere else modules)
    total = report.calibration.tokens
    assert tokens[True] == {total}
    assert set(routed[True]) == {None}
    # Each token goes to two experts, which have three layers each.
    assert sum(routed[False]) == 2 * total * 3 * 2
