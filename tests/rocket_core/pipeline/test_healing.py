"""Healing of artifacts: what changes and what does not, resuming, and what is refused."""

import shutil
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rocket_core.config import healing_config
from rocket_core.errors import (
    CheckpointFormatError,
    CompressionCancelledError,
    InsufficientMemoryError,
    InvalidConfigError,
)
from rocket_core.evaluation import open_model
from rocket_core.healing import schedule
from rocket_core.hf import attach_factors
from rocket_core.models.architecture import build_architecture
from rocket_core.pipeline import heal, requirements
from rocket_core.pipeline.artifact import open_artifact
from rocket_core.pipeline.stages.healing.plan import plan_healing
from tests.reference.factored_models import coded_values, mixed_factors, quantized_factors
from tests.reference.observers import Watch
from tests.reference.tiny_models import save_tiny_model

KINDS = {"factors": mixed_factors, "codes": quantized_factors, "codes of factors": coded_values}
CONFIG = healing_config(tokens=16384, sequence_length=16, device="cpu")
BOTH = ("rocket", "dense")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def artifact_of(tmp_path_factory, original):
    def make(kind):
        folder = tmp_path_factory.mktemp("artifacts")
        shutil.copytree(original, folder, dirs_exist_ok=True)
        model = AutoModelForCausalLM.from_pretrained(original)
        attach_factors(model, KINDS[kind](model)).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def healed(tmp_path_factory, artifact_of, original):
    artifact, output = artifact_of("factors"), tmp_path_factory.mktemp("healed")
    return artifact, output, heal(artifact, output, CONFIG, model=str(original), exports=BOTH)


@pytest.mark.parametrize("kind", KINDS)
def test_supports_codes_and_bytes_do_not_change(tmp_path, artifact_of, original, kind):
    artifact = artifact_of(kind)
    report = heal(artifact, tmp_path, CONFIG, model=str(original))
    assert not (tmp_path / "dense").exists()
    before, after = (load_file(folder / "model.safetensors") for folder in (artifact, tmp_path / "rocket"))
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (artifact, tmp_path / "rocket")]
    assert sizes[0] == sizes[1]
    assert (artifact / "config.json").read_bytes() == (tmp_path / "rocket" / "config.json").read_bytes()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (tensor.dtype, tensor.shape) == (after[name].dtype, after[name].shape)
        if tensor.dtype == torch.uint8 and not name.endswith("weight_scale"):
            assert torch.equal(tensor, after[name]), name
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert report.divergence_after < report.divergence_before


def test_the_dense_export_has_the_healed_weights(healed):
    _, output, _ = healed
    factored, dense = (AutoModelForCausalLM.from_pretrained(output / kind) for kind in ("rocket", "dense"))
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(dense(tokens).logits, factored(tokens).logits, rtol=1e-4, atol=1e-5)
    assert not hasattr(dense.config, "quantization_config")


def test_the_report_has_the_loss_curve(healed):
    _, _, report = healed
    assert [point.tokens for point in report.curve] == sorted(point.tokens for point in report.curve)
    held_out = [point.held_out for point in report.curve if point.held_out is not None]
    assert held_out[0] == report.divergence_before
    assert min(held_out) == report.divergence_after
    kept = next(point for point in report.curve if point.held_out == report.divergence_after)
    assert kept.step == report.kept_step


def test_an_artifact_that_only_gets_worse_is_left_as_it_is(tmp_path, artifact_of, original, monkeypatch):
    artifact = artifact_of("factors")
    # Steps uphill; large ones downhill end in NaN on some processors, and in a better artifact on others.
    monkeypatch.setattr(schedule.Schedule, "rate", lambda self, step: -1.0)
    report = heal(artifact, tmp_path, CONFIG, model=str(original), exports=("rocket",))
    assert report.kept_step == 0
    files = [folder / "model.safetensors" for folder in (artifact, tmp_path / "rocket")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(("tokens", "held_out"), [(256, 4), (16384, 32)])
def test_held_out_windows_are_spread_over_the_text(original, tokens, held_out):
    settings = healing_config(tokens=tokens, sequence_length=16, device="cpu")
    model = open_model(original)
    plan = plan_healing(model, build_architecture(model.config, torch.float32), settings)
    places = [place for place, row in enumerate(plan.windows) if (plan.text.held_out == row).all(dim=1).any()]
    assert len(plan.text.held_out) == held_out
    assert len(plan.windows) == len(plan.text.held_out) + len(plan.text.training)
    gaps = [after - before for before, after in pairwise(places)]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("step", [3, 8])
def test_cancelled_and_resumed_it_ends_with_the_same_bytes(tmp_path, healed, original, step):
    artifact, undisturbed, report = healed
    calls = iter(range(10**9))
    with pytest.raises(CompressionCancelledError, match="healing"):
        heal(
            artifact,
            tmp_path,
            CONFIG,
            model=str(original),
            exports=BOTH,
            observer=Watch(should_cancel=lambda: next(calls) == step),
        )
    with pytest.raises(InvalidConfigError, match="resume"):
        heal(artifact, tmp_path, CONFIG, model=str(original), exports=BOTH)
    assert heal(artifact, tmp_path, CONFIG, model=str(original), exports=BOTH, resume=True) == report
    for kind in BOTH:
        files = [folder / kind / "model.safetensors" for folder in (tmp_path, undisturbed)]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert not (tmp_path / ".rocket-work").exists()


def test_a_finished_result_is_returned_or_refused(healed, original):
    artifact, output, report = healed
    assert heal(artifact, output, CONFIG, model=str(original), exports=BOTH, resume=True) == report
    with pytest.raises(InvalidConfigError, match="already holds"):
        heal(artifact, output, CONFIG, model=str(original), exports=BOTH)


def test_the_original_must_be_named_without_a_report(tmp_path, healed):
    with pytest.raises(InvalidConfigError, match="--model"):
        heal(healed[0], tmp_path, CONFIG)


def test_a_dense_model_is_no_artifact(tmp_path, original):
    with pytest.raises(CheckpointFormatError, match="rocket"):
        heal(original, tmp_path, CONFIG, model=str(original))


def test_the_folder_of_an_earlier_version_is_found(tmp_path, healed):
    (tmp_path / "factored").symlink_to(healed[0], target_is_directory=True)
    assert open_artifact(tmp_path).model.path == healed[0].resolve()


def test_too_little_memory_for_both_models_is_refused(tmp_path, healed, original, monkeypatch):
    monkeypatch.setattr(requirements, "free_memory", lambda _device: 2**20)
    with pytest.raises(InsufficientMemoryError, match="as a whole"):
        heal(healed[0], tmp_path, CONFIG, model=str(original))
