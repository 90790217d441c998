"""Runs whose blocks are shared among two processes, here both on the CPU."""

import psutil
import pytest

from rocket_core.checkpoint import find_model
from rocket_core.errors import CompressionCancelledError
from rocket_core.pipeline import compress, profile_model, requirements
from rocket_core.pipeline.devices import processes
from rocket_core.pipeline.preflight import prepare_run
from rocket_core.pipeline.requirements import estimate_resources
from rocket_core.pipeline.state.profile_cache import ProfileCache
from rocket_core.pipeline.state.work_folder import WorkFolder
from tests.reference.observers import Watch
from tests.sampling import sweep

TWO = "cpu,cpu"
BYTES = {"preset": "fast", "ratio": None, "sensitivity_samples": 4, "export": ("rocket",)}
CASES = {
    "factors": {},
    "entropy-coded": BYTES | {"target_bytes": 120_000},
    "quantized": BYTES | {"bits": 4.0, "kinds": ("quantized",)},
    "statistics computed again": {"statistics_quota_bytes": 0},
    "sequential": {"preset": "best", "sensitivity_samples": 4},
}


@pytest.mark.parametrize("case", sweep([*CASES][:2], soak=[*CASES][2:]))
def test_two_processes_write_the_bytes_of_one(case, tmp_path, model_folder, settings, fingerprint, leave):
    model = str(model_folder("llama"))
    alone = compress(model, tmp_path / "one", settings(**CASES[case]))
    leave({1})

    shared = compress(model, tmp_path / "two", settings(**CASES[case], device=TWO))

    assert fingerprint(tmp_path / "two") == fingerprint(tmp_path / "one")
    assert [layer.name for layer in shared.layers] == [layer.name for layer in alone.layers]
    devices = {stage.name: stage.device for stage in shared.stages}
    assert devices["calibrating"].startswith("2 x ")
    assert devices["factorizing"].startswith("2 x ") == (case != "sequential")
    assert not devices["exporting"].startswith("2 x ")


def test_a_profile_of_two_processes_is_that_of_one(tmp_path, model_folder, settings, leave):
    def profile(name, device):
        caches = ProfileCache(tmp_path / f"{name} profiles")
        config = settings(ratio=None, preset="fast", sensitivity_samples=4, device=device)
        handed = []
        watch = Watch(on_profile=lambda position, found: handed.append((position, found.name)))
        found = profile_model(str(model_folder("llama")), tmp_path / name, config, profiles=caches, observer=watch)
        assert handed == [(place, layer.name) for place, layer in enumerate((*found.layers, *found.tables))]
        return found

    alone = profile("one", "cpu")
    leave({0})
    assert profile("two", TWO) == alone


def test_a_process_that_answers_late_is_counted(tmp_path, model_folder, settings, leave, fate):
    fate("late")
    leave({1})

    report = compress(str(model_folder("llama")), tmp_path / "out", settings(device=TWO))

    devices = {stage.name: stage.device for stage in report.stages}
    assert devices["calibrating"].startswith("2 x ")
    assert devices["factorizing"].startswith("2 x ")


@pytest.mark.parametrize("how", ["killed", "out of memory"])
def test_what_a_failed_process_left_is_done(how, tmp_path, model_folder, settings, finished, fingerprint, leave, fate):
    warnings = []
    fate(how)
    leave({1}, lambda: not warnings)

    compress(
        str(model_folder("llama")),
        tmp_path / "out",
        settings(device=TWO),
        observer=Watch(on_warning=warnings.append),
    )

    assert fingerprint(tmp_path / "out") == fingerprint(finished("llama")[0])
    [warning] = warnings
    assert "cpu takes no part any more" in warning
    assert ("signal 9" if how == "killed" else "OutOfMemoryError: CUDA out of memory") in warning


def test_no_process_outlives_a_cancelled_run(tmp_path, model_folder, settings, finished, fingerprint, leave):
    cancelled = []
    leave({1}, lambda: not cancelled)
    children = psutil.Process().children
    before, seen = set(children()), []

    def should_cancel():
        seen.extend(set(children()) - before - set(seen))
        work = WorkFolder(tmp_path / "out" / ".rocket-work")
        cancelled.extend([1] if work.is_claimed and work.block(1) is not None else [])
        return bool(cancelled)

    with pytest.raises(CompressionCancelledError):
        compress(
            str(model_folder("llama")),
            tmp_path / "out",
            settings(device=TWO),
            observer=Watch(should_cancel=should_cancel),
        )

    assert len(seen) == 1
    assert not seen[0].is_running()
    compress(str(model_folder("llama")), tmp_path / "out", settings(), resume=True)
    assert fingerprint(tmp_path / "out") == fingerprint(finished("llama")[0])


def test_a_device_without_memory_takes_no_part(tmp_path, model_folder, settings, finished, fingerprint, monkeypatch):
    warnings = []
    run = prepare_run(find_model(str(model_folder("llama"))), settings(device=TWO))
    free = int(1.9 * estimate_resources(run, 12).memory_bytes)
    monkeypatch.setattr(requirements, "free_memory", lambda device: free)
    monkeypatch.setattr(processes, "ChildProcess", None)

    compress(
        str(model_folder("llama")), tmp_path / "out", settings(device=TWO), observer=Watch(on_warning=warnings.append)
    )

    assert fingerprint(tmp_path / "out") == fingerprint(finished("llama")[0])
    assert [warning.partition(":")[0] for warning in warnings] == ["cpu takes no part"]
