"""Costs of the stages of a run, with a meter that counts its readings instead of energy."""

import json

import pytest
import torch

from rocket_core.config import compression_config
from rocket_core.errors import CompressionCancelledError
from rocket_core.linalg.kernels import for_device
from rocket_core.pipeline import compress
from rocket_core.pipeline.stage_costs import Costs, combined_costs
from rocket_core.report.schema import StageReport
from rocket_core.system.devices import device_name
from rocket_core.system.energy import EnergyMeter, EnergyReading
from tests.reference.observers import Watch

PROCESSOR, MEMORY, ACCELERATOR = 0.003, 0.0005, 0.25
CPU = torch.device("cpu")
STEP = PROCESSOR + MEMORY


class CountingMeter(EnergyMeter):
    """A meter whose readings each increase by one step."""

    def __init__(self, *, counted=True, fails_after=None, accelerator_kwh=ACCELERATOR):
        super().__init__()
        self.readings = 0
        self._counted = counted
        self._accelerator_kwh = accelerator_kwh
        self._fails_after = fails_after

    def reading(self):
        if self.readings == self._fails_after:
            return None
        self.readings += 1
        return EnergyReading(
            processor_kwh=self.readings * PROCESSOR,
            memory_kwh=self.readings * MEMORY,
            accelerator_kwh=self.readings * self._accelerator_kwh,
            processor_counted=self._counted,
        )


@pytest.fixture
def run(tmp_path, model_folder, settings):
    def run(*, resume=False, **more):
        return compress(str(model_folder("llama")), tmp_path / "out", settings(), resume=resume, **more)

    return run


@pytest.fixture
def cancelled(run):
    """Run until cancelled after a number of checks."""

    def cancelled(questions, **more):
        asked = iter(range(questions))
        with pytest.raises(CompressionCancelledError):
            run(observer=Watch(should_cancel=lambda: next(asked, None) is None), **more)

    return cancelled


def test_every_stage_has_its_measured_costs(run):
    report = run(meter=CountingMeter())
    assert [stage.name for stage in report.stages] == [
        "preflight",
        "calibrating",
        "allocating",
        "factorizing",
        "exporting",
    ]
    for stage in report.stages:
        assert stage.energy.kwh == pytest.approx(STEP), stage.name
        assert stage.energy.accelerator_kwh is None
        assert stage.energy.processor_counted
    assert report.energy_kwh == pytest.approx(STEP * len(report.stages))
    assert report.energy_text == "17.5 Wh"
    assert {stage.device for stage in report.stages} == set(report.devices)


def test_the_energy_of_resumed_runs_is_added_up(run, cancelled):
    cancelled(12, meter=CountingMeter())
    cancelled(20, meter=CountingMeter(), resume=True)
    report = run(meter=CountingMeter(counted=False), resume=True)
    energies = {stage.name: stage.energy for stage in report.stages}
    assert energies["preflight"].kwh == pytest.approx(3 * STEP)
    assert energies["calibrating"].kwh == pytest.approx(3 * STEP)
    assert energies["exporting"].kwh == pytest.approx(STEP)
    # One estimated run makes the sum an estimate.
    assert not energies["calibrating"].processor_counted
    assert report.energy_text.startswith("about ")


def test_energy_is_unknown_unless_every_run_measured_it(run, cancelled):
    cancelled(12)
    report = run(meter=CountingMeter(), resume=True)
    energies = {stage.name: stage.energy for stage in report.stages}
    assert energies["calibrating"] is None
    assert energies["exporting"].kwh == pytest.approx(STEP)
    assert (report.energy_kwh, report.energy_text) == (None, None)


def test_a_failing_meter_loses_the_figure_and_not_the_run(run):
    report = run(meter=CountingMeter(fails_after=3))
    assert [stage.energy is None for stage in report.stages] == [False, True, True, True, True]
    assert report.energy_kwh is None


def test_without_a_meter_there_is_a_device_but_no_energy(run):
    report = run()
    assert report.energy_kwh is None
    assert all(stage.energy is None for stage in report.stages)
    assert len(report.devices) == 1


def test_an_accelerator_is_named_with_its_memory(monkeypatch):
    for name, answer in (("peak_memory", 7), ("reset_peak_memory", None), ("device_name", "NVIDIA H100")):
        monkeypatch.setattr(f"rocket_core.pipeline.stage_costs.{name}", lambda _device, answer=answer: answer)
    costs = Costs(torch.device("cuda"), {}, meter=CountingMeter())
    with costs.of("calibrating"):
        pass
    [stage] = costs.stages
    assert stage.energy.accelerator_kwh == pytest.approx(ACCELERATOR)
    assert stage.energy.kwh == pytest.approx(STEP + ACCELERATOR)
    assert (stage.device, stage.peak_device_bytes) == ("NVIDIA H100", 7)


def test_an_unmetered_accelerator_has_unknown_energy(monkeypatch):
    for name in ("peak_memory", "reset_peak_memory"):
        monkeypatch.setattr(f"rocket_core.pipeline.stage_costs.{name}", lambda _device: None)
    monkeypatch.setattr("rocket_core.pipeline.stage_costs.device_name", lambda _device: "some accelerator")
    costs = Costs(torch.device("cuda"), {}, meter=CountingMeter(accelerator_kwh=0.0))
    with costs.of("calibrating"):
        pass
    assert costs.stages[0].energy is None


def test_a_run_that_moved_names_both_devices(monkeypatch):
    earlier = {}
    for name in ("here", "there", "here"):
        monkeypatch.setattr("rocket_core.pipeline.stage_costs.device_name", lambda _device, name=name: name)
        costs = Costs(CPU, earlier)
        with costs.of("calibrating"):
            pass
        earlier = {stage.name: stage for stage in costs.stages}
    assert earlier["calibrating"].device == "here; there"


def test_stages_that_round_name_what_ran_the_loops(tmp_path, model_folder, settings):
    report = compress(
        str(model_folder("llama")), tmp_path / "out", compression_config(bits=4, calibration=settings().calibration)
    )
    assert {stage.name: stage.kernels for stage in report.stages} == {
        "preflight": None,
        "differentiating": None,
        "calibrating": "numba",
        "allocating": None,
        "factorizing": "numba",
        "exporting": None,
    }


def test_kernels_of_all_parts_of_a_stage_are_named():
    earlier = {}
    for device in ("cpu", "meta", "cpu"):
        costs = Costs(CPU, earlier)
        with costs.of("factorizing"):
            for_device(torch.device(device))
            running = costs.stages[0]
        with costs.of("exporting"):
            pass
        earlier = {stage.name: stage for stage in costs.stages}
    assert running.kernels == earlier["factorizing"].kernels == "numba; torch"
    assert earlier["exporting"].kernels is None


def test_costs_of_a_running_stage_are_saved_periodically(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("rocket_core.pipeline.stage_costs.time.monotonic", lambda: clock[0])
    kept = []
    costs = Costs(CPU, {}, meter=CountingMeter(), save=kept.append)
    with costs.of("calibrating"):
        for _ in range(12):
            clock[0] += 2.5
            costs.save_if_due()
        # Saved costs are counted only once.
        clock[0] += 1
    assert [stages[0].seconds for stages in kept] == [10.0, 20.0, 30.0]
    assert kept[-1][0].energy.kwh == pytest.approx(3 * STEP)
    [stage] = costs.stages
    assert (stage.seconds, stage.energy.kwh) == (31.0, pytest.approx(4 * STEP))


def test_a_processor_is_named_with_its_threads():
    assert device_name(CPU).endswith(", 1 thread")


def test_costs_are_saved_before_a_run_can_end(monkeypatch, run, tmp_path):
    monkeypatch.setattr("rocket_core.pipeline.stage_costs._SAVE_SECONDS", 0.0)
    told = []

    def look(progress):
        file = tmp_path / "out" / ".rocket-work" / "stages.json"
        if file.exists():
            told.append({stage["name"]: stage["energy"] for stage in json.loads(file.read_text())})

    run(meter=CountingMeter(), observer=Watch(on_progress=look))
    assert any("calibrating" in stages and "factorizing" not in stages for stages in told)
    assert list(told[-1]) == ["preflight", "calibrating", "allocating", "factorizing", "exporting"]


def test_costs_of_two_runs_are_added_by_stage():
    def stage(name, seconds, memory, device="cpu"):
        return StageReport(name=name, seconds=seconds, peak_memory_bytes=memory, device=device)

    first = [stage("factorizing", 1.0, 10), stage("exporting", 2.0, 20)]
    combined = combined_costs(first, [stage("healing", 4.0, 5), stage("exporting", 8.0, 15, "gpu")])
    assert [(cost.name, cost.seconds, cost.peak_memory_bytes) for cost in combined] == [
        ("factorizing", 1.0, 10),
        ("healing", 4.0, 5),
        ("exporting", 10.0, 20),
    ]
    assert combined[-1].device == "cpu; gpu"


def test_costs_of_all_processes_are_added(monkeypatch):
    monkeypatch.setattr("rocket_core.pipeline.stage_costs.device_name", lambda device: f"a {device}")
    monkeypatch.setattr("rocket_core.pipeline.stage_costs.peak_memory", lambda _device: 2000)
    monkeypatch.setattr("rocket_core.pipeline.stage_costs._peak_resident_bytes", lambda: 10)
    costs = Costs(CPU, {})
    with costs.of("calibrating"):
        for device, peak in (("a cpu", 1000), ("a cuda:1", 3000), ("a cpu", None)):
            costs.add_process(
                StageReport(
                    name="calibrating", seconds=99.0, peak_memory_bytes=5, peak_device_bytes=peak, device=device
                )
            )
    with costs.of("factorizing"):
        pass
    calibrating, factorizing = costs.stages
    assert (calibrating.device, calibrating.peak_device_bytes) == ("3 x a cpu; a cuda:1", 3000)
    assert (calibrating.peak_memory_bytes, factorizing.peak_memory_bytes) == (25, 10)
    assert calibrating.seconds < 50
    assert (factorizing.device, factorizing.peak_device_bytes) == ("a cpu", 2000)
