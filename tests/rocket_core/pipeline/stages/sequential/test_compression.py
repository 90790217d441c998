"""Whole runs with sensitivities, all kinds of candidates, and layers compressed one after another."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rocket_core.hf  # noqa: F401  registers the format
from rocket_core.errors import CompressionCancelledError
from rocket_core.models.residual_stream import ResidualStream
from rocket_core.pipeline import compress
from tests.reference.observers import Watch
from tests.rocket_core.pipeline.conftest import RATIO
from tests.sampling import sweep

FACTORED = ("low_rank", "factored", "shared")


@pytest.fixture(scope="module")
def run_with(tmp_path_factory, model_folder, settings):
    """Compress a tiny model with a preset, once for equal settings; return the output folder and the report."""
    made = {}

    def make(family="llama", **changes):
        chosen = settings(**({"preset": "best", "sensitivity_samples": 4, "export": ("rocket",)} | changes))
        key = family, chosen.model_dump_json()
        if key not in made:
            output = tmp_path_factory.mktemp("sequential")
            made[key] = output, compress(str(model_folder(family)), output, chosen)
        return made[key]

    return make


def tensors(output):
    return load_file(output / "rocket" / "model.safetensors")


@pytest.mark.parametrize(
    ("kinds", "budget"),
    sweep(
        [(("low_rank", "factored", "shared", "sparse"), "parameters"), (("sparse",), "bytes")],
        soak=[
            (("low_rank", "factored", "shared", "sparse"), "bytes"),
            (("sparse",), "parameters"),
            (FACTORED, "parameters"),
            (FACTORED, "bytes"),
        ],
    ),
)
def test_the_budget_is_used_and_never_exceeded(run_with, kinds, budget):
    _, report = run_with(kinds=kinds, budget=budget)
    achieved = report.totals.achieved_ratio if budget == "parameters" else report.totals.achieved_byte_ratio
    assert RATIO - 1e-12 <= achieved <= RATIO + 0.002 * (1 - RATIO)
    assert report.allocation.kept <= report.allocation.budget
    assert {layer.kind for layer in report.layers} <= {*kinds, "dense"} | {"low_rank", "factored"} - {"sparse"}


def test_the_artifact_matches_the_report_of_each_layer(run_with):
    output, report = run_with(kinds=("low_rank", "factored", "shared", "sparse"))
    stored = tensors(output)
    model = AutoModelForCausalLM.from_pretrained(output / "rocket")
    assert torch.isfinite(model(torch.arange(1, 17).unsqueeze(0)).logits).all()
    for layer in report.layers:
        parts = [value for key, value in stored.items() if key.startswith(f"{layer.name}.weight")]
        assert layer.stored_bytes == sum(part.nbytes for part in parts)
        if layer.kind != "dense":
            assert layer.nnz == stored[f"{layer.name}.weight"].numel()
            assert 0 < layer.achieved_error < 1


def test_layers_with_dense_inputs_match_independent_compression(run_with):
    # Nothing is compressed before the first block's first layers.
    in_sequence, report = run_with(kinds=("sparse",), token_weights="none")  # noqa: S106 - no password
    apart, _ = run_with(kinds=("sparse",), token_weights="none", sequential=False)  # noqa: S106 - no password
    first, second = tensors(in_sequence), tensors(apart)
    group = report.layers[0].name
    for layer in report.layers:
        if layer.input_group == group and layer.kind == "sparse":
            torch.testing.assert_close(
                first[f"{layer.name}.weight"], second[f"{layer.name}.weight"], rtol=1e-3, atol=1e-4
            )
    last = report.layers[-1].name
    assert not torch.equal(first[f"{last}.weight"], second[f"{last}.weight"])


def test_token_weights_in_sequence_leave_the_profiles(run_with, tmp_path, model_folder, settings, monkeypatch):
    weighted, before = run_with(kinds=("sparse",))
    monkeypatch.setattr("rocket_core.pipeline.stages.sequential.compression.SEQUENTIAL_POWER", 0.0)
    chosen = settings(preset="best", sensitivity_samples=4, export=("rocket",), kinds=("sparse",))
    after = compress(str(model_folder("llama")), tmp_path, chosen)
    assert [layer.nnz for layer in after.layers] == [layer.nnz for layer in before.layers]
    assert [layer.reconstruction_error for layer in after.layers] == [
        layer.reconstruction_error for layer in before.layers
    ]
    assert any(not torch.equal(tensor, tensors(weighted)[name]) for name, tensor in tensors(tmp_path).items())


def test_layers_compensate_for_the_residual_stream(run_with, tmp_path, model_folder, settings, monkeypatch):
    chosen = settings(preset="best", sensitivity_samples=4, export=("rocket",), kinds=("sparse",))
    with_stream, _ = run_with(kinds=("sparse",))
    monkeypatch.setattr(
        "rocket_core.pipeline.stages.sequential.input_sums.find_residual_stream", lambda *_: ResidualStream()
    )
    compress(str(model_folder("llama")), tmp_path, chosen)
    changed = {
        name.removesuffix(".weight")
        for name, tensor in tensors(tmp_path).items()
        if not torch.equal(tensor, tensors(with_stream)[name])
    }
    # The stream that the first layer adds to does not deviate yet; later layers read what others make of it.
    assert "model.layers.0.self_attn.o_proj" not in changed
    assert {"model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj"} < changed


def test_an_encoder_is_fitted_to_the_dense_inputs(run_with, tmp_path, model_folder, settings, monkeypatch):
    in_sequence, apart = (
        tensors(run_with("bert", kinds=("sparse",), sequential=sequential)[0]) for sequential in (True, False)
    )
    assert any(not torch.equal(in_sequence[name], tensor) for name, tensor in apart.items())
    # Without a step towards compensating targets, nothing depends on the layers before.
    monkeypatch.setattr("rocket_core.pipeline.stages.sequential.cross_sums._STEP_IN_WHOLE_TEXTS", 0.0)
    chosen = settings(preset="best", sensitivity_samples=4, export=("rocket",), kinds=("sparse",))
    compress(str(model_folder("bert")), tmp_path, chosen)
    without_steps = tensors(tmp_path)
    for name, tensor in apart.items():
        torch.testing.assert_close(without_steps[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_shared_dictionary_is_stored_once_and_reported(run_with):
    output, report = run_with(kinds=("shared",))
    owners = {layer.dictionary for layer in report.layers if layer.dictionary}
    assert owners
    stored = tensors(output)
    for layer in report.layers:
        if layer.dictionary:
            assert (f"{layer.name}.weight_u" in stored) == (layer.dictionary == layer.name)
            assert layer.dictionary in owners
            assert layer.dictionary == layer.input_group


@pytest.mark.parametrize("sequential", sweep([True], soak=[False]))
def test_a_stopped_run_resumes_to_the_same_bytes(run_with, tmp_path, model_folder, settings, sequential):
    expected, _ = run_with(kinds=FACTORED, sequential=sequential)
    chosen = settings(preset="best", sensitivity_samples=4, export=("rocket",), kinds=FACTORED, sequential=sequential)
    model = str(model_folder("llama"))
    for stage, steps in (("differentiating", 0), ("calibrating", 2), ("factorizing", 0), ("factorizing", 1)):
        seen = []

        def note(progress, stage=stage, seen=seen):
            if progress.stage == stage and progress.layer not in {None, *seen}:
                seen.append(progress.layer)

        with pytest.raises(CompressionCancelledError):
            compress(
                model,
                tmp_path,
                chosen,
                resume=True,
                observer=Watch(on_progress=note, should_cancel=lambda seen=seen, steps=steps: len(seen) > steps),
            )
    compress(model, tmp_path, chosen, resume=True)
    assert (tmp_path / "rocket" / "model.safetensors").read_bytes() == (
        expected / "rocket" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("family", sweep(["llama", "t5"], soak=["whisper", "roberta", "gpt2"]))
def test_caching_outputs_changes_nothing(family, tmp_path, model_folder, settings, monkeypatch):
    calibration = {"samples": 4} | ({"dataset": "synthetic"} if family == "whisper" else {})
    # The kinds of one family are enough: outputs are cached before any candidate is made.
    kinds = {} if family == "llama" else {"kinds": ("sparse",)}
    chosen = settings(preset="best", sensitivity_samples=4, export=("rocket",), **kinds).model_copy(
        update={"calibration": settings().calibration.model_copy(update=calibration)}
    )
    monkeypatch.setattr("rocket_core.estimates.batch_size.TOKENS_PER_BATCH_ON_CPU", 64)
    compress(str(model_folder(family)), tmp_path / "kept", chosen)
    monkeypatch.setattr("rocket_core.models.part_cache._size", lambda output: None)
    compress(str(model_folder(family)), tmp_path / "run", chosen)
    kept, run = (tmp_path / name / "rocket" / "model.safetensors" for name in ("kept", "run"))
    assert kept.read_bytes() == run.read_bytes()


def test_attention_of_a_block_runs_twice_per_stream(tmp_path, model_folder, settings, monkeypatch):
    calls, stages = [], []
    attention = torch.nn.functional.scaled_dot_product_attention

    def note(*args, **kwargs):
        calls.append(stages[-1])
        return attention(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", note)
    monkeypatch.setattr("rocket_core.estimates.batch_size.TOKENS_PER_BATCH_ON_CPU", 64)
    chosen = settings(preset="best", kinds=("sparse",), sensitivity_samples=4, export=("rocket",))
    compress(
        str(model_folder("llama")),
        tmp_path,
        chosen,
        observer=Watch(on_progress=lambda progress: stages.append(progress.stage)),
    )
    blocks = AutoModelForCausalLM.from_pretrained(model_folder("llama")).config.num_hidden_layers
    batches = 6
    # The first batch, which runs to the end, shows whether a layer is called only once, and once what its parts add.
    assert calls.count("factorizing") == blocks * (2 * 2 * batches + 2)


def test_a_group_is_profiled_first_and_reported_in_model_order(tmp_path, model_folder, settings):
    seen, told = [], []
    chosen = settings(preset="fast", sensitivity_samples=4, export=("rocket",))
    report = compress(
        str(model_folder("llama")),
        tmp_path,
        chosen,
        observer=Watch(
            on_progress=lambda progress: seen.append((progress.stage, progress.layer)),
            on_profile=lambda position, profile: told.append((position, profile.name)),
        ),
    )
    assert told == list(enumerate(layer.name for layer in report.layers))
    # A block starts under the name of its first layer.
    last = {layer: place for place, (stage, layer) in enumerate(seen) if stage == "calibrating" and layer is not None}
    for layer in report.layers:
        if layer.input_group != layer.name:
            assert last[layer.name] < last[layer.input_group]


@pytest.mark.parametrize("family", sweep(["t5", "vit"], soak=["whisper", "roberta"]))
def test_the_best_preset_supports_every_kind_of_model(family, run_with):
    calibration = {"samples": 4} | ({} if family in {"t5", "roberta"} else {"dataset": "synthetic"})
    _, report = run_with(family, preset="best", calibration=calibration)
    assert all(layer.achieved_error < 1 for layer in report.layers)
    assert 0.3 - 1e-12 <= report.totals.achieved_ratio <= 0.302


@pytest.mark.soak
def test_layers_of_an_encoder_decoder_are_compressed_in_turn(run_with):
    _, report = run_with(
        "t5",
        objective="whitened",
        column_weights=False,
        kinds=("low_rank", "factored"),
        ignore=("*.SelfAttention.*",),
        calibration={"samples": 4},
    )
    assert {layer.kind for layer in report.layers} & {"low_rank", "factored"}
    assert all(layer.achieved_error < 1 for layer in report.layers)
