import pytest

from rocket_core.errors import CompressionCancelledError, InsufficientMemoryError, InvalidConfigError
from rocket_core.pipeline import compress, requirements
from rocket_core.pipeline.stages import evaluate
from rocket_core.report.schema import CompressionReport
from rocket_core.speed import SpeedSettings
from tests.reference.observers import Watch
from tests.reference.speed import speed_report


@pytest.fixture
def measured(monkeypatch):
    """Replace the measurement, and return the calls of it."""
    calls = []

    def measure(subjects, how, *, on_step, check):
        calls.append((subjects, how))
        on_step(0.5, "half")
        check()
        return speed_report()

    monkeypatch.setattr(evaluate, "measure_speed", measure)
    return calls


@pytest.mark.slow
def test_the_report_has_the_speed_of_every_export(tmp_path, model_folder, settings, fingerprint, finished):
    report = compress(str(model_folder("llama")), tmp_path / "out", settings(benchmark=True))

    assert [(speed.name, speed.form) for speed in report.speed.models] == [
        ("original", "dense"),
        ("rocket", "rocket"),
        ("dense", "dense"),
    ]
    assert report.speed.unmeasured == ()
    assert report.stages[-1].name == "benchmarking"
    assert CompressionReport.model_validate_json((tmp_path / "out" / "report.json").read_text()) == report
    assert "## Speed" in (tmp_path / "out" / "rocket" / "README.md").read_text()
    assert fingerprint(tmp_path / "out") == fingerprint(finished("llama")[0])


def test_models_run_as_the_run_does(tmp_path, model_folder, settings, measured):
    seen = []
    folder, how = str(model_folder("llama")), settings(benchmark=True)
    compress(folder, tmp_path / "out", how, observer=Watch(on_progress=seen.append))

    [(subjects, given)] = measured
    assert [subject.name for subject in subjects] == ["original", *how.export]
    assert isinstance(given, SpeedSettings)
    assert given.device == "cpu"
    assert given.prompt_tokens is None, "short contexts shorten it"
    assert "benchmarking" in {progress.stage for progress in seen}
    assert [progress.fraction for progress in seen] == sorted(progress.fraction for progress in seen)


def test_without_a_request_nothing_is_measured(tmp_path, model_folder, settings, measured):
    report = compress(str(model_folder("llama")), tmp_path / "out", settings())

    assert report.speed is None
    assert not measured
    assert "benchmarking" not in {stage.name for stage in report.stages}


def test_a_cancelled_benchmark_is_repeated_on_resume(tmp_path, model_folder, settings, measured):
    folder, output, how = str(model_folder("llama")), tmp_path / "out", settings(benchmark=True)
    seen = []

    def stop():
        return bool(seen) and seen[-1].stage == "benchmarking"

    with pytest.raises(CompressionCancelledError, match="measuring speed"):
        compress(folder, output, how, observer=Watch(on_progress=seen.append, should_cancel=stop))

    assert compress(folder, output, how, resume=True).speed == speed_report()


def test_a_finished_benchmark_is_not_repeated(tmp_path, model_folder, settings, measured, monkeypatch):
    folder, output, how = str(model_folder("llama")), tmp_path / "out", settings(benchmark=True)

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rocket_core.pipeline.stages.publish.write_description", die)
        with pytest.raises(KeyboardInterrupt):
            compress(folder, output, how)

    assert compress(folder, output, how, resume=True).speed == speed_report()
    assert len(measured) == 1


def test_a_finished_run_is_not_measured_afterwards(model_folder, settings, finished):
    with pytest.raises(InvalidConfigError, match="rocket bench"):
        compress(str(model_folder("llama")), finished("llama")[0], settings(benchmark=True), resume=True)


def test_an_encoder_is_refused_before_any_work(tmp_path, model_folder, settings):
    with pytest.raises(InvalidConfigError, match=r"does not generate text.*leave benchmark out"):
        compress(str(model_folder("bert")), tmp_path / "out", settings(benchmark=True))

    assert not (tmp_path / "out" / "report.json").exists()


def test_too_little_memory_for_all_models_is_refused(tmp_path, model_folder, settings, monkeypatch):
    needed = []
    run = settings(benchmark=True)
    compress_one = str(model_folder("llama"))
    monkeypatch.setattr(requirements, "free_memory", lambda _device: 2**30)

    with pytest.raises(InsufficientMemoryError, match=r"all of them in memory.*rocket bench"):
        compress(compress_one, tmp_path / "out", run, observer=Watch(on_requirements=needed.append))

    assert not needed
