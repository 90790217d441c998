"""A job that only profiles a model, and the work it saves for later jobs."""

import os
import threading

import pytest
from sqlalchemy import select

from app.shared.models import Profile
from app.shared.repositories import events, outputs
from rocket_core.pipeline.block_walk import BlockWalk
from rocket_core.report.schema import CompressionReport, StageReport
from tests.worker.threads import ThreadedAttempt as Attempt

QUICK = {"calibration": {"samples": 2, "sequence_length": 16}}


@pytest.fixture
def attempt(settings, database, claim, look):
    def attempt(job_id, stop=None, settings=settings):
        Attempt(settings, database, claim(job_id), stop or threading.Event()).run(os.getppid())
        return look(job_id)

    return attempt


def test_a_profile_is_stored_and_reused_by_the_next_job(
    model, submit, attempt, published, stored, work, database, messages
):
    first = attempt(submit(**QUICK, ratio=None))
    assert (first.status, first.progress, first.result, first.error) == ("succeeded", 1.0, None, None)
    assert published(first.id) == {}
    assert stored() == []
    assert list(work.iterdir()) == []
    assert "factorizing" not in messages(first.id)
    second = attempt(submit(**QUICK, ratio=0.4))
    assert second.status == "succeeded"
    assert second.profile_id == first.profile_id is not None
    with database.snapshot() as session:
        profile = session.get(Profile, first.profile_id)
        layers = outputs.list_layer_profiles(session, second.id)
        assert len(layers) == profile.layer_count
        assert layers == outputs.list_layer_profiles(session, first.id)
        predicted = {point["ratio"]: point for point in profile.frontier}[0.4]
        report = outputs.find_report(session, second).body
    assert report["allocation"]["total_error"] == pytest.approx(predicted["error"])
    assert report["totals"]["kept_parameters"] == predicted["kept_parameters"]


def test_a_profile_has_its_costs(model, submit, attempt, configure, database):
    job = attempt(submit(**QUICK, ratio=None), settings=configure(measure_energy=True))
    with database.snapshot() as session:
        [costs] = [event for event in events.list_events(session, job.id, limit=1000) if event.type == "costs"]
    stages = [StageReport.model_validate(stage) for stage in costs.data["stages"]]
    assert [stage.name for stage in stages] == ["preflight", "differentiating", "calibrating"]
    assert all(stage.energy is not None and stage.device for stage in stages)
    assert costs.message.startswith("took ")
    assert costs.message.endswith("Wh")


def test_an_evicted_profile_is_restored_without_calibration(
    model, submit, attempt, configure, look, database, monkeypatch
):
    settings = configure(max_profiles=1)
    jobs = [submit(calibration=QUICK["calibration"] | {"seed": seed}, ratio=None) for seed in (0, 1, 0)]
    first, second = [attempt(job_id, settings=settings) for job_id in jobs[:2]]
    assert (look(first.id).profile_id, look(second.id).profile_id) == (None, second.profile_id)
    monkeypatch.setattr(BlockWalk, "statistics", lambda *_args, **_options: pytest.fail("calibrated again"))
    again = attempt(jobs[2], settings=settings)
    assert (again.status, look(second.id).profile_id) == ("succeeded", None)
    with database.snapshot() as session:
        assert session.scalars(select(Profile.id)).all() == [again.profile_id]


def test_a_size_is_respected(model, submit, attempt, published):
    whole = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    job = attempt(submit(**QUICK, ratio=None, target_bytes=round(0.8 * whole)))
    assert job.status == "succeeded"
    files = published(job.id)
    assert 0.7 * whole < len(files["rocket/model.safetensors"]) <= 0.8 * whole


def test_bits_are_respected_and_reuse_the_profile_of_a_size(model, submit, attempt, published):
    whole = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    sized = attempt(submit(**QUICK, ratio=None, target_bytes=round(0.8 * whole)))
    job = attempt(submit(**QUICK, ratio=None, bits=6.5))
    assert (job.status, job.profile_id) == ("succeeded", sized.profile_id)
    report = CompressionReport.model_validate_json(published(job.id)["report.json"])
    assert 6 < report.bits_per_weight <= 6.5


def test_a_released_profile_job_can_be_resumed(model, submit, attempt, look, messages):
    stop = threading.Event()
    stop.set()
    job_id = submit(**QUICK, ratio=None)
    assert attempt(job_id, stop).status == "queued"
    assert attempt(job_id).status == "succeeded"
