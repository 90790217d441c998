"""Models that read text with images or audio, calibrated on text: from the checkpoint to the artifacts and back."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModelForSpeechSeq2Seq

from rocket_core.checkpoint import find_model
from rocket_core.errors import CompressionCancelledError
from rocket_core.hf import attach_factors
from rocket_core.layers import LayerFactors, unpack_coefficients
from rocket_core.pipeline import compress
from rocket_core.pipeline.block_walk import BlockWalk, loaded_surroundings
from rocket_core.pipeline.preflight import prepare_run
from tests.reference.observers import Watch
from tests.reference.tiny_mixtures import inputs
from tests.reference.tiny_speech import SPEECH, save_tiny_speech
from tests.reference.tiny_vision import VISION, save_tiny_vision
from tests.sampling import sweep

RATIO = 0.3
MODELS = VISION | SPEECH
KEPT = ["qwen2_vl", "qwen3_vl", "gemma3", "smolvlm", "qwen2_audio", "qwen3_omni_moe_thinker", "vibevoice"]
FAMILIES = sweep(KEPT, soak=[family for family in MODELS if family not in KEPT])
LAYERS_OF_A_BLOCK = {"qwen3_vl_moe": 4 + 3 * 4, "llama4": 4 + 3 * 4 + 3, "qwen3_omni_moe_thinker": 4 + 3 * 4}
CLASSES = dict.fromkeys(SPEECH, AutoModelForMultimodalLM) | {
    "vibevoice": AutoModelForSpeechSeq2Seq,
    "qwen3_omni_moe_thinker": AutoModelForImageTextToText,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return complete checkpoints of the tiny families, made once."""
    made = {}

    def make(family):
        if family not in made:
            save = save_tiny_vision if family in VISION else save_tiny_speech
            made[family] = save(family, tmp_path_factory.mktemp("vision") / family)
        return made[family]

    return make


@pytest.fixture(scope="module")
def compressed(tmp_path_factory, folder, settings):
    """Return the output folder and the report of an uninterrupted run of a family."""
    made = {}

    def make(family):
        if family not in made:
            output = tmp_path_factory.mktemp("compressed") / family
            made[family] = output, compress(str(folder(family)), output, settings(preset="fast", kinds=("factored",)))
        return made[family]

    return make


def load(path, **options):
    # The name of the folder, or of that which contains the artifacts.
    family = next(name for name in (path.name, path.parent.name) if name in MODELS)
    return CLASSES.get(family, AutoModelForImageTextToText).from_pretrained(path, **options)


@torch.no_grad()
def logits(model):
    return model(inputs()).logits


def factors_of(stored, report):
    """Return what an artifact has in place of the weights of its layers."""
    factors = {}
    for layer in report.layers:
        if layer.kind == "factored":
            state = stored.get_submodule(layer.name).state_dict()
            mask = state.get("weight_mask")
            coefficients = unpack_coefficients(state["weight"], mask, layer.rank, layer.d_out, layer=layer.name)
            factors[layer.name] = LayerFactors(
                dictionary=state["weight_u"].T,
                coefficients=coefficients,
                support=None if mask is None else coefficients != 0,
            )
    return factors


@pytest.mark.parametrize("family", FAMILIES)
class TestEveryFamily:
    def test_the_blocks_of_the_decoder_are_compressed(self, family, compressed, folder):
        _, report = compressed(family)
        model = MODELS[family]()
        prefix = "language_model.model.layers." if family == "llama4" else "text_model.layers."
        prefix = prefix if family in ("llama4", "idefics3", "smolvlm") else "language_model.layers."
        assert all(prefix in layer.name for layer in report.layers)
        blocks = model.config.get_text_config().num_hidden_layers
        assert len(report.layers) == blocks * LAYERS_OF_A_BLOCK.get(family, 7)
        assert not report.skipped
        assert report.model_class == CLASSES.get(family, AutoModelForImageTextToText).__name__
        kept = sum(layer.kept_parameters for layer in report.layers)
        assert kept <= report.allocation.budget <= (1 - RATIO) * sum(x.d_in * x.d_out for x in report.layers)

    def test_the_rocket_artifact_equals_its_factors(self, family, compressed, folder):
        output, report = compressed(family)
        stored, info = load(output / "rocket", output_loading_info=True)
        assert not any(info.values())
        factors = factors_of(stored, report)
        assert len(factors) >= len(report.layers) / 3
        original = load(folder(family))
        before = logits(original)
        assert torch.equal(logits(stored), logits(attach_factors(original, factors)))
        assert not torch.allclose(logits(stored), before, atol=1e-2)

    def test_the_dense_export_loads_and_generates_alike(self, family, compressed, folder):
        output, _ = compressed(family)
        dense, source = (load_file(path / "model.safetensors") for path in (output / "dense", folder(family)))
        shapes = {key: (value.shape, value.dtype) for key, value in source.items()}
        assert {key: (value.shape, value.dtype) for key, value in dense.items()} == shapes
        towers = [key for key in source if any(part in key for part in ("vis", "audio", "encoder"))]
        assert towers
        assert all(torch.equal(dense[key], source[key]) for key in towers)
        models = [load(output / kind) for kind in ("rocket", "dense")]
        torch.testing.assert_close(*map(logits, models), rtol=1e-3, atol=1e-3)
        if family != "vibevoice":  # It generates audio.
            tokens = [model.generate(inputs()[:1, :8], max_new_tokens=6, do_sample=False) for model in models]
            assert torch.equal(*tokens)
        files = [json.loads((path / "config.json").read_text()) for path in (output / "dense", folder(family))]
        assert files[0] == files[1]

    def test_dequantizing_equals_the_dense_export(self, family, compressed, tmp_path):
        output, _ = compressed(family)
        load(output / "rocket").dequantize().save_pretrained(tmp_path)
        found, dense = (load_file(path / "model.safetensors") for path in (tmp_path, output / "dense"))
        assert found.keys() == dense.keys()
        assert all(torch.equal(value, dense[key]) for key, value in found.items())

    def test_the_walk_matches_the_whole_model(self, family, folder, settings):
        run = prepare_run(find_model(str(folder(family))), settings())
        calibration = run.inputs.draw(run.config.calibration)
        walk = BlockWalk(run, calibration, lambda: None)
        blocks = run.architecture.lists[0]
        walk.advance_to(blocks.stop)
        whole = load(folder(family))
        last = whole.get_submodule(blocks.name)[-1]
        seen = []
        last.register_forward_hook(
            lambda _m, _a, output: seen.append(output[0] if isinstance(output, tuple) else output)
        )
        with torch.no_grad():
            whole(**calibration.tensors)
        torch.testing.assert_close(torch.cat(walk._states.hidden), seen[0], rtol=1e-5, atol=1e-5)

    def test_text_loads_one_module_of_the_tower_at_most(self, family, folder, settings):
        run = prepare_run(find_model(str(folder(family))), settings())
        towers = 2 if "omni" in family else 0 if family in ("granite_speech", "vibevoice_asr") else 1
        assert len(run.idle) == towers
        with loaded_surroundings(run, run.architecture.lists[-1], head=True) as model:
            for tower in run.idle:
                held = [name for name, value in model.get_submodule(tower).named_parameters() if not value.is_meta]
                assert len({name.rpartition(".")[0] for name in held}) <= 1
            assert any(not parameter.is_meta for parameter in model.get_output_embeddings().parameters())


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "gemma3", "smolvlm", "vibevoice"])
def test_a_stopped_run_ends_with_identical_bytes(family, tmp_path, folder, settings, compressed, fingerprint):
    config = settings(preset="fast", kinds=("factored",))
    for stop in ("layers.0.mlp.up_proj", "layers.1."):
        seen = []
        with pytest.raises(CompressionCancelledError):
            compress(
                str(folder(family)),
                tmp_path / "out",
                config,
                resume=True,
                observer=Watch(
                    on_progress=seen.append,
                    should_cancel=lambda: bool(seen) and stop in (seen[-1].layer or ""),  # noqa: B023
                ),
            )
    compress(str(folder(family)), tmp_path / "out", config, resume=True)
    assert fingerprint(tmp_path / "out") == fingerprint(compressed(family)[0])


def test_a_size_may_be_met_with_embedding_and_head(tmp_path, folder, settings):
    for family in ("qwen3_vl", "qwen2_vl"):
        size = sum(file.stat().st_size for file in folder(family).glob("*.safetensors")) * 6 // 10
        config = settings(preset="fast", cap_slack=0.0, ratio=None, target_bytes=size, export=("rocket",))
        report = compress(str(folder(family)), tmp_path / family, config)
        assert report.tables[0] == "model.language_model.embed_tokens"
        assert 0.9 * size <= report.exports[0].stored_bytes <= size
        assert torch.isfinite(logits(load(tmp_path / family / "rocket"))).all()


def test_the_card_shows_how_to_load_it(compressed):
    output, _ = compressed("qwen2_vl")
    card = (output / "rocket" / "README.md").read_text()
    assert "from transformers import AutoModelForImageTextToText, AutoTokenizer\n" in card
