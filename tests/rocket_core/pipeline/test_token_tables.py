"""Compression that quantizes the token embedding and the head."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

import rocket_core.hf  # noqa: F401  # registers the quantizer
from rocket_core.checkpoint import find_model
from rocket_core.errors import CompressionCancelledError
from rocket_core.pipeline import ProfileCache, compress, profile_model
from rocket_core.pipeline.block_walk import BlockWalk
from rocket_core.pipeline.preflight import prepare_run
from rocket_core.sizes.target import ByBytes, ByRatio
from tests.reference.observers import Watch
from tests.sampling import sweep

BYTES = {"budget": "bytes", "preset": "fast", "sensitivity_samples": 4, "kinds": ("quantized",)}
TABLES = {
    "llama": ("model.embed_tokens", "lm_head"),
    "gpt2": ("transformer.wte",),
    "opt": ("model.decoder.embed_tokens",),
    "gpt_neox": ("gpt_neox.embed_in", "lm_head"),
    "falcon": ("transformer.word_embeddings",),
    "bert": ("embeddings.word_embeddings",),
    "gemma": ("model.embed_tokens",),
    "roberta": ("roberta.embeddings.word_embeddings",),
    "t5": ("shared",),
    "vit": (),
}


def size_of(folder):
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.fixture
def within(model_folder, settings, tmp_path):
    """Compress a family to a part of its size; returns the output folder and the report."""

    def make(family, part, *, output="out", profiles=None, should_cancel=None, **changes):
        target = round(part * size_of(model_folder(family)))
        config = settings(**{"ratio": None, "target_bytes": target, **BYTES, **changes})
        more = {} if should_cancel is None else {"observer": Watch(should_cancel=should_cancel), "resume": True}
        report = compress(str(model_folder(family)), tmp_path / output, config, profiles=profiles, **more)
        return tmp_path / output, report

    return make


@pytest.fixture(scope="module")
def finished_within(tmp_path_factory, model_folder, settings):
    """Return the output folder and the report of a family compressed to a part of its size, each made once."""

    @functools.cache
    def make(family, part, sequential):
        target = round(part * size_of(model_folder(family)))
        images = {"calibration": {"dataset": "synthetic", "samples": 4}} if family == "vit" else {}
        config = settings(**{"ratio": None, "target_bytes": target, "sequential": sequential, **BYTES, **images})
        output = tmp_path_factory.mktemp("tables") / "out"
        return output, compress(str(model_folder(family)), output, config)

    return make


class TestSize:
    @pytest.mark.parametrize(
        "family", sweep(["llama", "gpt2", "gemma", "roberta"], soak=["opt", "gpt_neox", "bert", "t5", "vit"])
    )
    def test_tables_are_quantized_where_the_model_allows(self, finished_within, model_folder, family):
        part = 0.25 if TABLES[family] else 0.75
        output, report = finished_within(family, part, False)
        assert report.tables == TABLES[family]
        layers = {layer.name: layer for layer in report.layers}
        assert [layer.name for layer in report.layers[len(report.layers) - len(report.tables) :]] == [*report.tables]
        assert size_of(output / "rocket") <= part * size_of(model_folder(family))
        for name in TABLES[family]:
            assert layers[name].kind == "quantized"
            assert layers[name].achieved_error == pytest.approx(layers[name].reconstruction_error, rel=0.5)
        change = "linear layers and embeddings" if TABLES[family] else "linear layers"
        assert f"{change} in {report.bits_per_weight:.2f} bits" in report.change_text

    @pytest.mark.parametrize(
        ("family", "sequential"),
        sweep(
            [("llama", True), ("gpt2", False), ("gemma", False)],
            soak=[("llama", False), ("gpt2", True), ("bert", False), ("bert", True)],
        ),
    )
    def test_both_exports_compute_the_same(self, finished_within, family, sequential):
        output, _ = finished_within(family, 0.25, sequential)
        tokens = torch.arange(24)[None] % 300
        loader = AutoModel if family == "bert" else AutoModelForCausalLM
        with torch.no_grad():
            found = [
                loader.from_pretrained(output / export)(tokens, output_hidden_states=True).hidden_states[-1]
                for export in ("rocket", "dense")
            ]
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)

    def test_other_tables_are_named_with_the_reason(self, within):
        _, report = within("llama", 0.7, ignore=("lm_head",))
        assert report.tables == ("model.embed_tokens",)
        assert report.skipped == {"lm_head": "ignored by 'lm_head'"}

    @pytest.mark.parametrize(
        ("family", "objective"), sweep([("gpt2", "whitened")], soak=[("llama", "whitened"), ("gpt2", "fisher")])
    )
    def test_outputs_may_count_equally(self, within, family, objective):
        _, report = within(family, 0.25, objective=objective, column_weights=False)
        assert {layer.kind for layer in report.layers if layer.name in TABLES[family]} == {"quantized"}

    @pytest.mark.parametrize("sequential", sweep([True], soak=[False]))
    def test_a_cancelled_run_resumes_to_the_same_bytes(self, within, finished_within, sequential):
        whole, _ = finished_within("llama", 0.25, sequential)
        cancelled = 0
        for after in (3, 20, 40, 48, 60, 75, 80, 90, 10**9):
            left = iter(range(after))
            try:
                parts, _ = within(
                    "llama",
                    0.25,
                    output="parts",
                    sequential=sequential,
                    should_cancel=lambda left=left: next(left, None) is None,
                )
            except CompressionCancelledError:
                cancelled += 1
        assert cancelled >= 4
        for export in ("rocket", "dense"):
            name = f"{export}/model.safetensors"
            assert (parts / name).read_bytes() == (whole / name).read_bytes()

    def test_statistics_that_do_not_fit_are_collected_again(self, within, finished_within):
        stored, _ = finished_within("llama", 0.25, False)
        collected, _ = within("llama", 0.25, output="again", statistics_quota_bytes=0)
        name = "rocket/model.safetensors"
        assert (collected / name).read_bytes() == (stored / name).read_bytes()


class TestOtherTargets:
    def test_a_ratio_is_one_of_the_layers_in_blocks(self, model_folder, settings, tmp_path):
        report = compress(str(model_folder("llama")), tmp_path / "out", settings(ratio=0.8, **BYTES))
        assert report.tables == ()
        assert not {layer.name for layer in report.layers} & {*TABLES["llama"]}
        stored, original = (
            load_file(folder / "model.safetensors") for folder in (tmp_path / "out" / "rocket", model_folder("llama"))
        )
        for name in TABLES["llama"]:
            assert torch.equal(stored[f"{name}.weight"], original[f"{name}.weight"])

    def test_a_ratio_can_include_embeddings(self, model_folder, settings, tmp_path):
        config = settings(ratio=0.8, include=("embeddings",), **BYTES)
        report = compress(str(model_folder("llama")), tmp_path / "out", config)
        assert report.tables == TABLES["llama"]
        dense = sum(4 * layer.d_in * layer.d_out for layer in report.layers)
        stored = sum(layer.stored_bytes for layer in report.layers)
        assert 0.19 * dense <= stored <= 0.2 * dense
        assert {layer.kind for layer in report.layers if layer.name in report.tables} == {"quantized"}

    def test_a_size_can_leave_embeddings_alone(self, within, model_folder):
        output, report = within("llama", 0.7, include=())
        assert report.tables == ()
        table = json.loads((output / "rocket" / "config.json").read_text())["quantization_config"]["layers"]
        assert table.keys().isdisjoint(TABLES["llama"])

    def test_parameters_never_touch_embeddings(self, model_folder, settings):
        run = prepare_run(find_model(str(model_folder("llama"))), settings(ratio=0.3, preset="fast"))
        assert run.tables == ()
        run = prepare_run(find_model(str(model_folder("llama"))), settings(ratio=0.3, **BYTES))
        assert [table.name for table in run.tables] == [*TABLES["llama"]]


class TestProfiles:
    def test_one_profile_answers_ratios_and_sizes(self, model_folder, settings, tmp_path, within, monkeypatch):
        cache = ProfileCache(tmp_path / "profiles")
        config = settings(ratio=None, **BYTES)
        profile = profile_model(str(model_folder("llama")), tmp_path / "profile", config, profiles=cache)
        predictor = profile.predictor()
        assert [table.name for table in profile.tables] == [*TABLES["llama"]]
        whole = size_of(model_folder("llama"))
        for target, layers in ((ByRatio(ratio=0.8), 14), (ByBytes(target_bytes=round(0.25 * whole)), 16)):
            allocation = predictor.allocate(target)
            chosen = predictor.chosen(allocation)
            assert len(chosen) == len(profile.layers_for(target)) == layers
            size = profile.bytes_beside(layers) + sum(candidate.stored_bytes for _, candidate in chosen)
            assert size < (0.25 if layers == 16 else 0.65) * whole + 1
        for method in ("statistics", "head_statistics"):
            monkeypatch.setattr(BlockWalk, method, lambda *_args, **_options: pytest.fail("calibrated again"))
        _, report = within("llama", 0.25, profiles=cache)
        assert report.tables == TABLES["llama"]

    def test_callbacks_receive_the_tables_last(self, model_folder, settings, tmp_path):
        seen, chosen = [], []
        target = round(0.25 * size_of(model_folder("gpt2")))
        config = settings(ratio=None, target_bytes=target, **BYTES)
        compress(
            str(model_folder("gpt2")),
            tmp_path / "out",
            config,
            observer=Watch(
                on_profile=lambda position, profile: seen.append((position, profile.name)), on_allocation=chosen.extend
            ),
        )
        assert [position for position, _ in seen] == [*range(9)]
        assert seen[-1][1] == "transformer.wte"
        assert [name for _, name in seen] == [name for name, _ in chosen]
