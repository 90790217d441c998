import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from app.shared.fork_server import ForkServer
from rocket_core.checkpoint import find_model
from rocket_core.errors import (
    CompressionCancelledError,
    CorruptCheckpointError,
    InvalidConfigError,
    RocketError,
    WorkFolderError,
)
from rocket_core.pipeline import compress, requirements
from rocket_core.pipeline.preflight import prepare_run
from tests.reference.observers import Watch
from tests.reference.tiny_models import save_tiny_model
from tests.sampling import sweep


def count_steps(model, output, config):
    steps = []
    compress(model, output, config, observer=Watch(on_progress=steps.append))
    return steps


def cancel_at(step):
    calls = iter(range(10**9))
    return lambda: next(calls) == step


@pytest.fixture(scope="module")
def steps(tmp_path_factory, model_folder, settings):
    return count_steps(str(model_folder("llama")), tmp_path_factory.mktemp("steps") / "out", settings())


@pytest.mark.parametrize("every", sweep([41], soak=[7]))
def test_cancelled_anywhere_it_resumes_to_the_same_bytes(
    tmp_path, model_folder, settings, finished, fingerprint, steps, every
):
    expected = fingerprint(finished("llama")[0])
    for step in range(0, len(steps), every):
        output = tmp_path / str(step)
        with pytest.raises(CompressionCancelledError, match="resume"):
            compress(str(model_folder("llama")), output, settings(), observer=Watch(should_cancel=cancel_at(step)))
        assert not (output / "rocket").exists()
        compress(str(model_folder("llama")), output, settings(), resume=True)
        assert fingerprint(output) == expected, step
        assert sorted(path.name for path in output.iterdir()) == ["dense", "report.html", "report.json", "rocket"]


@pytest.mark.parametrize("kills", sweep([((0.4, 0.75),)], soak=[((0.15, 0.4, 0.6, 0.75),)]))
def test_killed_repeatedly_it_resumes_to_the_same_bytes(
    tmp_path, model_folder, settings, finished, fingerprint, steps, kills
):
    output = tmp_path / "out"
    server = ForkServer("tests.rocket_core.pipeline.victim:run", environment=os.environ)
    try:
        for fraction in kills:
            step = next(index for index, progress in enumerate(steps) if progress.fraction >= fraction)
            arguments = [str(model_folder("llama")), str(output), settings().model_dump_json(), step]
            (tmp_path / "arguments").write_text(json.dumps(arguments))
            with (tmp_path / "arguments").open() as file, server.fork([file.fileno()]) as victim:
                assert victim.wait(300) == -signal.SIGKILL
    finally:
        server.close()
    compress(str(model_folder("llama")), output, settings(), resume=True)
    assert fingerprint(output) == fingerprint(finished("llama")[0])


def test_a_resumed_run_does_not_repeat_finished_layers(tmp_path, model_folder, settings, steps):
    half = next(index for index, progress in enumerate(steps) if progress.stage == "factorizing")
    with pytest.raises(CompressionCancelledError):
        compress(
            str(model_folder("llama")), tmp_path / "out", settings(), observer=Watch(should_cancel=cancel_at(half))
        )
    profiles = sorted((tmp_path / "out" / ".rocket-work" / "profiles").iterdir())
    assert len(profiles) == 14
    before = {file.name: file.stat().st_mtime_ns for file in profiles}
    seen = []
    with pytest.raises(CompressionCancelledError):
        compress(
            str(model_folder("llama")),
            tmp_path / "out",
            settings(),
            resume=True,
            observer=Watch(on_progress=seen.append, should_cancel=lambda: bool(seen) and seen[-1].stage == "exporting"),
        )
    assert {file.name: file.stat().st_mtime_ns for file in profiles} == before


def test_stage_times_add_up_over_resumed_runs(tmp_path, model_folder, settings, steps):
    half = next(index for index, progress in enumerate(steps) if progress.stage == "factorizing")
    with pytest.raises(CompressionCancelledError):
        compress(
            str(model_folder("llama")), tmp_path / "out", settings(), observer=Watch(should_cancel=cancel_at(half))
        )
    stored = json.loads((tmp_path / "out" / ".rocket-work" / "stages.json").read_text())
    before = {stage["name"]: stage["seconds"] for stage in stored}
    report = compress(str(model_folder("llama")), tmp_path / "out", settings(), resume=True)
    after = {stage.name: stage.seconds for stage in report.stages}
    assert list(after) == ["preflight", "calibrating", "allocating", "factorizing", "exporting"]
    assert after["calibrating"] >= before["calibrating"] > 0


def test_unfinished_work_is_not_overwritten_without_resume(tmp_path, model_folder, settings):
    with pytest.raises(CompressionCancelledError):
        compress(str(model_folder("llama")), tmp_path / "out", settings(), observer=Watch(should_cancel=cancel_at(5)))
    with pytest.raises(InvalidConfigError, match="resume"):
        compress(str(model_folder("llama")), tmp_path / "out", settings())


@pytest.mark.parametrize(
    ("changes", "named"), [({"ratio": 0.4}, "ratio was 0.3 and is now 0.4"), ({"precision": "float64"}, "precision")]
)
def test_work_with_other_settings_is_refused(tmp_path, model_folder, settings, changes, named):
    with pytest.raises(CompressionCancelledError):
        compress(str(model_folder("llama")), tmp_path / "out", settings(), observer=Watch(should_cancel=cancel_at(5)))
    with pytest.raises(WorkFolderError, match=named):
        compress(str(model_folder("llama")), tmp_path / "out", settings(**changes), resume=True)


def test_work_with_other_weights_is_refused(tmp_path, settings):
    model = tmp_path / "model"
    save_tiny_model("llama", model)
    with pytest.raises(CompressionCancelledError):
        compress(str(model), tmp_path / "out", settings(), observer=Watch(should_cancel=cancel_at(5)))
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    with pytest.raises(WorkFolderError, match="revision"):
        compress(str(model), tmp_path / "out", settings(), resume=True)


def test_work_with_another_text_of_the_same_name_is_refused(tmp_path, model_folder, settings, text):
    copy = tmp_path / "text.jsonl"
    copy.write_bytes(text.read_bytes())
    config = settings(calibration={"dataset": str(copy), "samples": 12, "sequence_length": 32})
    with pytest.raises(CompressionCancelledError):
        compress(str(model_folder("llama")), tmp_path / "out", config, observer=Watch(should_cancel=cancel_at(5)))
    copy.write_text(copy.read_text().replace("rocket", "kettle"))
    with pytest.raises(WorkFolderError, match="calibration was"):
        compress(str(model_folder("llama")), tmp_path / "out", config, resume=True)


def test_a_refused_run_does_not_change_existing_work(tmp_path, model_folder, settings):
    with pytest.raises(CompressionCancelledError):
        compress(str(model_folder("llama")), tmp_path / "out", settings(), observer=Watch(should_cancel=cancel_at(2)))
    work = tmp_path / "out" / ".rocket-work"
    before = {file: file.read_bytes() for file in work.rglob("*") if file.is_file()}
    for changes in ({"ratio": 0.95}, {"ignore": ("nothing",)}):
        with pytest.raises(RocketError):
            compress(str(model_folder("llama")), tmp_path / "out", settings(**changes))
    assert {file: file.read_bytes() for file in work.rglob("*") if file.is_file()} == before


def test_remains_without_an_identity_are_ignored(tmp_path, model_folder, settings, finished, fingerprint, steps):
    half = next(index for index, progress in enumerate(steps) if progress.stage == "exporting")
    with pytest.raises(CompressionCancelledError):
        compress(
            str(model_folder("llama")),
            tmp_path / "out",
            settings(ratio=0.5),
            observer=Watch(should_cancel=cancel_at(half)),
        )
    (tmp_path / "out" / ".rocket-work" / "run.json").unlink()
    compress(str(model_folder("llama")), tmp_path / "out", settings())
    assert fingerprint(tmp_path / "out") == fingerprint(finished("llama")[0])


def test_two_processes_cannot_work_in_one_folder(tmp_path, model_folder, settings):
    def second(_progress):
        with pytest.raises(WorkFolderError, match="another process"):
            compress(str(model_folder("llama")), tmp_path / "out", settings(), resume=True)
        raise KeyboardInterrupt

    def first(progress):
        if progress.stage == "calibrating" and progress.layer:
            second(progress)

    with pytest.raises(KeyboardInterrupt):
        compress(str(model_folder("llama")), tmp_path / "out", settings(), observer=Watch(on_progress=first))
    compress(str(model_folder("llama")), tmp_path / "out", settings(), resume=True)


def test_killed_while_publishing_it_resumes(tmp_path, model_folder, settings, finished, fingerprint, monkeypatch):
    moved = []
    replace = Path.replace

    def die_at_the_second(self, target):
        if self.parent.name == "exports" and self.is_dir():
            moved.append(target)
            if len(moved) == 2:
                raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            compress(str(model_folder("llama")), tmp_path / "out", settings())
    assert (tmp_path / "out" / "rocket").is_dir()
    with pytest.raises(InvalidConfigError, match="resume"):
        compress(str(model_folder("llama")), tmp_path / "out", settings())
    compress(str(model_folder("llama")), tmp_path / "out", settings(), resume=True)
    assert fingerprint(tmp_path / "out") == fingerprint(finished("llama")[0])


def test_folders_not_made_by_a_run_are_not_replaced(tmp_path, model_folder, settings):
    (tmp_path / "out" / "dense").mkdir(parents=True)
    (tmp_path / "out" / "dense" / "precious").write_text("mine")
    for resume in (False, True):
        with pytest.raises(InvalidConfigError, match="dense"):
            compress(str(model_folder("llama")), tmp_path / "out", settings(), resume=resume)
    assert (tmp_path / "out" / "dense" / "precious").read_text() == "mine"


def test_resuming_counts_the_disk_already_used(tmp_path, model_folder, settings, steps, monkeypatch):
    late = next(index for index, progress in enumerate(steps) if progress.stage == "exporting")
    with pytest.raises(CompressionCancelledError):
        compress(
            str(model_folder("llama")), tmp_path / "out", settings(), observer=Watch(should_cancel=cancel_at(late))
        )
    held = sum(f.stat().st_size for f in (tmp_path / "out" / ".rocket-work").rglob("*") if f.is_file())
    run = prepare_run(find_model(str(model_folder("llama"))), settings())
    needed = requirements.estimate_resources(run, 12).disk_bytes
    usage = shutil.disk_usage(tmp_path)._replace(free=needed - held)
    monkeypatch.setattr(requirements, "free_disk", lambda _folder: usage.free)
    compress(str(model_folder("llama")), tmp_path / "out", settings(), resume=True)


def test_a_finished_run_on_another_text_is_not_reused(tmp_path, model_folder, settings, text):
    copy = tmp_path / "text.jsonl"
    copy.write_bytes(text.read_bytes())
    config = settings(calibration={"dataset": str(copy), "samples": 12, "sequence_length": 32}, export=("rocket",))
    compress(str(model_folder("llama")), tmp_path / "out", config)
    copy.write_text(copy.read_text().replace("rocket", "kettle"))
    with pytest.raises(InvalidConfigError, match="another compression"):
        compress(str(model_folder("llama")), tmp_path / "out", config, resume=True)


def test_a_damaged_work_file_is_named(tmp_path, model_folder, settings, steps):
    half = next(index for index, progress in enumerate(steps) if progress.stage == "factorizing")
    with pytest.raises(CompressionCancelledError):
        compress(
            str(model_folder("llama")), tmp_path / "out", settings(), observer=Watch(should_cancel=cancel_at(half))
        )
    basis = next((tmp_path / "out" / ".rocket-work" / "bases").iterdir())
    basis.write_bytes(basis.read_bytes()[:-3])
    with pytest.raises(CorruptCheckpointError, match=basis.name):
        compress(str(model_folder("llama")), tmp_path / "out", settings(), resume=True)


def test_resuming_a_finished_run_only_returns_its_report(finished, model_folder, settings, fingerprint):
    output, report = finished("llama")
    before = {file: file.stat().st_mtime_ns for file in output.rglob("*")}
    assert compress(str(model_folder("llama")), output, settings(), resume=True) == report
    assert {file: file.stat().st_mtime_ns for file in output.rglob("*")} == before


def test_artifacts_of_another_run_are_not_overwritten(finished, model_folder, settings, fingerprint):
    output, _ = finished("llama")
    before = fingerprint(output)
    for resume in (False, True):
        with pytest.raises(InvalidConfigError, match="choose another output folder"):
            compress(str(model_folder("llama")), output, settings(ratio=0.4), resume=resume)
    assert fingerprint(output) == before


def test_two_runs_produce_identical_bytes(tmp_path, model_folder, settings, finished, fingerprint):
    compress(str(model_folder("llama")), tmp_path / "out", settings())
    assert fingerprint(tmp_path / "out") == fingerprint(finished("llama")[0])


@pytest.mark.parametrize("quota", [0, 20_000])
def test_recalibrating_without_cached_bases_gives_equal_weights(
    tmp_path, model_folder, settings, finished, fingerprint, quota
):
    compress(str(model_folder("llama")), tmp_path / "out", settings(statistics_quota_bytes=quota))
    assert fingerprint(tmp_path / "out") == fingerprint(finished("llama")[0])
