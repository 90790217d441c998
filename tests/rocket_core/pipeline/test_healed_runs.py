"""Compressions that heal their result before it is exported."""

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from app.shared.fork_server import ForkServer
from rocket_core.config import healing_config
from rocket_core.errors import (
    CompressionCancelledError,
    EmptyCalibrationError,
    InsufficientMemoryError,
    InvalidConfigError,
    UnsupportedArchitectureError,
)
from rocket_core.estimates.footprint import ResourceEstimate
from rocket_core.pipeline import compress, heal, requirements
from rocket_core.pipeline.state.healing_state import HealingState
from tests.reference.observers import Watch

TOKENS = 16384
KINDS = {
    "parameters": {"ratio": 0.4, "preset": "fast", "sensitivity_samples": 4},
    "refined": {"ratio": 0.4, "preset": "max", "sensitivity_samples": 4},
}


@pytest.fixture(scope="module")
def healing(settings, text):
    def make(**changes):
        calibration = {"dataset": str(text), "samples": 24, "sequence_length": 16}
        small = {"calibration": calibration, "heal_tokens": TOKENS, "device": "cpu", **KINDS["parameters"]}
        return settings(**(small | changes))

    return make


@pytest.fixture(scope="module", params=KINDS)
def runs(request, tmp_path_factory, model_folder, healing):
    """Return the settings, and the outputs of a compression healed within the run, and of one healed afterwards."""
    model, folder = str(model_folder("llama")), tmp_path_factory.mktemp("healed")
    config = healing(**KINDS[request.param])
    points = []
    within = compress(model, folder / "within", config, observer=Watch(on_healing=points.append))
    compress(model, folder / "before", config.model_copy(update={"heal_tokens": None}))
    afterwards = heal(folder / "before", folder / "after", config.healing, model=model, exports=("rocket", "dense"))
    return folder, within, afterwards, points, config


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def test_the_artifact_is_that_of_healing_afterwards(runs):
    folder, within, afterwards, points, _ = runs
    assert weights(folder / "within" / "rocket") == weights(folder / "after" / "rocket")
    assert weights(folder / "within" / "rocket") != weights(folder / "before" / "rocket")
    assert within.healing == afterwards
    assert tuple(points) == afterwards.curve
    assert within.totals.stored_bytes == (folder / "before" / "rocket" / "model.safetensors").stat().st_size
    names = [stage.name for stage in within.stages]
    assert names.index("factorizing") < names.index("healing") < names.index("exporting")


def test_the_report_has_each_stage_once(runs):
    folder = runs[0]
    before, after = (
        {stage["name"]: stage["seconds"] for stage in json.loads((folder / name / "report.json").read_text())["stages"]}
        for name in ("before", "after")
    )
    stages = json.loads((folder / "after" / "report.json").read_text())["stages"]
    assert [stage["name"] for stage in stages] == [*list(before)[:-1], "healing", "exporting"]
    assert after["exporting"] > before["exporting"]


def test_the_dense_export_is_healed_as_well(runs):
    folder = runs[0]
    within, after = (load_file(folder / name / "dense" / "model.safetensors") for name in ("within", "after"))
    assert within.keys() == after.keys()
    for name, tensor in after.items():
        torch.testing.assert_close(within[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.soak  # `tests/worker/attempt/test_job_healing.py` kills a job.
@pytest.mark.parametrize("runs", ["refined"], indirect=True)
def test_killed_twice_it_ends_with_the_same_bytes(tmp_path, runs, model_folder):
    folder, whole, _, points, config = runs
    server = ForkServer("tests.rocket_core.pipeline.victim:run", environment=os.environ)
    try:
        for step in (4, 1):
            arguments = [str(model_folder("llama")), str(tmp_path / "out"), config.model_dump_json(), step, "healing"]
            (tmp_path / "arguments").write_text(json.dumps(arguments))
            with (tmp_path / "arguments").open() as file, server.fork([file.fileno()]) as victim:
                assert victim.wait(300) == -signal.SIGKILL
    finally:
        server.close()
    checkpoint = HealingState.within(tmp_path / "out" / ".rocket-work").checkpoint()
    assert checkpoint is not None
    resumed = []
    report = compress(
        str(model_folder("llama")), tmp_path / "out", config, resume=True, observer=Watch(on_healing=resumed.append)
    )
    assert resumed == points
    assert report.healing == whole.healing
    for export in ("rocket", "dense"):
        assert weights(tmp_path / "out" / export) == weights(folder / "within" / export)


def test_a_cancelled_run_resumes_at_its_checkpoint(tmp_path, runs, model_folder):
    folder, whole, _, points, config = runs
    seen, steps = [], []
    with pytest.raises(CompressionCancelledError, match="healing"):
        compress(
            str(model_folder("llama")),
            tmp_path,
            config,
            observer=Watch(on_healing=seen.append, should_cancel=lambda: len(seen) == 5),
        )
    assert seen == points[:5]

    def on_progress(progress):
        if progress.stage == "healing" and progress.layer is not None:
            steps.append(progress.layer)

    resumed = []
    report = compress(
        str(model_folder("llama")),
        tmp_path,
        config,
        resume=True,
        observer=Watch(on_healing=resumed.append, on_progress=on_progress),
    )
    assert resumed == points
    assert 0 < len(set(steps)) < report.healing.steps
    assert report.healing == whole.healing
    for export in ("rocket", "dense"):
        assert weights(tmp_path / export) == weights(folder / "within" / export)


def test_settings_of_another_healing_are_another_run(tmp_path, model_folder, healing):
    model = str(model_folder("llama"))
    with pytest.raises(CompressionCancelledError):
        compress(model, tmp_path, healing(), observer=Watch(should_cancel=iter([*[False] * 9, True]).__next__))
    with pytest.raises(Exception, match="heal_tokens was 16384 and is now 500"):
        compress(model, tmp_path, healing(heal_tokens=500), resume=True)


def test_the_evaluation_reads_nothing_that_was_trained_on(tmp_path, model_folder, healing, text):
    evaluate = {"dataset": str(text), "sequence_length": 16, "samples": 4}
    with pytest.raises(EmptyCalibrationError, match="nothing is left"):
        compress(str(model_folder("llama")), tmp_path, healing(evaluate=evaluate))


def test_a_model_that_predicts_no_tokens_is_refused(tmp_path, model_folder, settings):
    config = settings(heal_tokens=1000, calibration={"samples": 4, "sequence_length": 16})
    with pytest.raises(UnsupportedArchitectureError, match="predict next tokens"):
        compress(str(model_folder("bert")), tmp_path, config)


def test_too_little_memory_is_refused_before_work_starts(tmp_path, model_folder, healing, monkeypatch):
    needed = ResourceEstimate(memory_bytes=2**60, disk_bytes=0)
    monkeypatch.setattr(requirements, "healing_footprint", lambda _sizes, call_tokens: needed)
    with pytest.raises(InsufficientMemoryError, match="as a whole"):
        compress(str(model_folder("llama")), tmp_path, healing())


def test_engines_without_rocket_artifacts_are_refused(settings):
    with pytest.raises(InvalidConfigError, match="heal_tokens"):
        settings(heal_tokens=1000, engine="llama.cpp", preset="fast")


def test_it_is_healed_on_the_text_of_the_calibration(healing, text):
    assert healing().healing == healing_config(tokens=TOKENS, dataset=str(text), sequence_length=16, device="cpu")
    assert healing(heal_tokens=None).healing is None
