import itertools

import pytest
import torch

from rocket_core.checkpoint import find_model
from rocket_core.errors import CompressionCancelledError
from rocket_core.pipeline import compress
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.stage_costs import Costs
from rocket_core.report.schema import StageReport
from tests.reference.observers import COMPRESSING, Watch


def place(progress):
    return progress.stage, progress.layer, progress.fraction


def test_callbacks_get_all_profiles_and_the_allocation(tmp_path, model_folder, settings):
    profiles, allocations = [], []
    report = compress(
        str(model_folder("llama")),
        tmp_path / "out",
        settings(),
        observer=Watch(
            on_profile=lambda position, profile: profiles.append((position, profile)), on_allocation=allocations.append
        ),
    )
    assert [position for position, _ in profiles] == list(range(len(report.layers)))
    assert [profile.name for _, profile in profiles] == [layer.name for layer in report.layers]
    [allocation] = allocations
    told = [(layer.name, layer.kind, layer.rank, layer.nnz, layer.kept_parameters) for layer in report.layers]
    assert [(name, it.kind, it.rank, it.nnz, it.kept_parameters) for name, it in allocation] == told
    assert all(
        candidate in profile.candidates for (_, profile), (_, candidate) in zip(profiles, allocation, strict=True)
    )


def test_a_resumed_run_also_reports_earlier_profiles(tmp_path, model_folder, settings, finished):
    output, before = tmp_path / "out", []

    def first(position, profile):
        before.append((position, profile))

    with pytest.raises(CompressionCancelledError):
        compress(
            str(model_folder("llama")),
            output,
            settings(),
            observer=Watch(on_profile=first, should_cancel=lambda: len(before) >= 9),
        )
    after = []
    compress(
        str(model_folder("llama")),
        output,
        settings(),
        resume=True,
        observer=Watch(on_profile=lambda position, profile: after.append((position, profile))),
    )
    assert after[: len(before)] == before
    assert len(after) == len(finished("llama")[1].layers) > len(before)


def test_a_profile_is_on_disk_before_its_callback(tmp_path, model_folder, settings):
    class OutOfReachError(Exception):
        pass

    output = tmp_path / "out"

    def refuse(position, profile):
        assert (output / ".rocket-work" / "profiles" / f"{profile.name}.json").is_file()
        if position == 3:
            raise OutOfReachError

    with pytest.raises(OutOfReachError):
        compress(str(model_folder("llama")), output, settings(), observer=Watch(on_profile=refuse))
    assert compress(str(model_folder("llama")), output, settings(), resume=True).layers


def test_the_time_left_is_estimated_from_layers_only(tmp_path, model_folder, settings):
    told = []
    compress(str(model_folder("llama")), tmp_path / "out", settings(), observer=Watch(on_progress=told.append))
    # Within a step the same place is reported again.
    told = [told[0], *(new for old, new in itertools.pairwise(told) if place(new) != place(old))]
    first_layer = next(index for index, progress in enumerate(told) if progress.layer is not None)
    assert [progress.seconds_left for progress in told[: first_layer + 1]] == [None] * (first_layer + 1)
    assert all(progress.seconds_left is not None for progress in told[first_layer + 2 :])
    assert told[-1].seconds_left == 0


def test_stages_have_the_parts_of_the_run_that_are_expected():
    found = []
    observer = Watch(on_progress=lambda progress: found.append(progress.fraction))
    monitor = Monitor(observer, Costs(torch.device("cpu"), {}), stages=COMPRESSING)
    monitor.expect({"preflight": 1.0, "calibrating": 2.0, "factorizing": 7.0, "healing": 5.0})
    for stage in ("calibrating", "factorizing"):
        with monitor.stage(stage):
            monitor.step(1.0)
    begun, profiled, _same, compressed = found
    assert compressed - profiled > 3 * (profiled - begun) > 0
    monitor.expect({})
    with monitor.stage("exporting"):
        monitor.step(1.0)
    assert found[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("counted", [True, False])
def test_counted_healing_takes_the_speed_of_earlier_stages(counted):
    found = []
    observer = Watch(on_progress=found.append)
    monitor = Monitor(observer, Costs(torch.device("cpu"), {}), stages=[*COMPRESSING, "healing"])
    monitor.expect({"calibrating": 2.0, "factorizing": 7.0} | ({"healing": 5.0} if counted else {}))
    with monitor.stage("preflight"):
        monitor.step(1.0)
    with monitor.stage("calibrating"):
        monitor.step(1.0)
    with monitor.stage("healing"):
        assert (found[-1].seconds_left is not None) == counted


def test_a_run_reports_progress_and_cancels_within_a_block(tmp_path, model_folder, settings, monkeypatch):
    # One window per batch, so that there is something between one layer and the next.
    monkeypatch.setattr("rocket_core.estimates.batch_size.TOKENS_PER_BATCH_ON_CPU", 1)
    folder, told = str(model_folder("llama")), []

    def run(output, **functions):
        compress(folder, tmp_path / output, settings(), observer=Watch(on_progress=told.append, **functions))

    run("whole")
    same_place = sum(place(new) == place(old) for old, new in itertools.pairwise(told))
    assert same_place >= settings().calibration.samples
    first = next(index for index, progress in enumerate(told) if progress.layer is not None)
    told.clear()
    with pytest.raises(CompressionCancelledError):
        run("cancelled", should_cancel=lambda: len(told) > first + 2)
    assert place(told[-1]) == place(told[-2])


def test_work_resumes_under_another_name_of_the_same_device(tmp_path, model_folder, settings):
    folder, output, layers = str(model_folder("llama")), tmp_path / "out", []
    with pytest.raises(CompressionCancelledError):
        compress(
            folder,
            output,
            settings(device="cpu"),
            observer=Watch(on_profile=lambda *_: layers.append(1), should_cancel=lambda: len(layers) > 2),
        )
    assert compress(folder, output, settings(device="cpu:0"), resume=True).layers


def test_memory_and_network_needs_are_reported_before_the_work(tmp_path, model_folder, settings):
    told = []
    compress(
        str(model_folder("llama")),
        tmp_path / "out",
        settings(),
        observer=Watch(
            on_progress=lambda progress: told.append(progress.stage),
            on_requirements=told.append,
            on_offline=lambda: told.append("offline"),
        ),
    )
    [needed] = [one for one in told if isinstance(one, int)]
    assert needed > 10 * 2**20
    assert told[: told.index("calibrating")] == ["preflight", needed, "offline"]


def test_a_model_found_earlier_gives_the_same_result(tmp_path, model_folder, settings, finished):
    source = find_model(str(model_folder("llama")))
    download = StageReport(name="downloading", seconds=1.5, peak_memory_bytes=1)
    report = compress(source, tmp_path / "out", settings(), download=download)
    folder, expected = finished("llama")
    assert report.fingerprint == expected.fingerprint
    for name in ("rocket/model.safetensors", "dense/model.safetensors", "rocket/config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes(), name
    assert [stage.name for stage in report.stages] == ["downloading", *(stage.name for stage in expected.stages)]
    assert report.stages[0].seconds == 1.5
    assert report.stages[0].device == report.stages[1].device
