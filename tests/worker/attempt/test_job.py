"""A job's process, mostly inside this one: `Attempt` is all of it except signal handling and its exit."""

import fcntl
import hashlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from app.shared.database import Database
from app.shared.errors import DatabaseUnavailableError, FencedOutError
from app.shared.lifecycle import Status
from app.shared.repositories import outputs, sweeps
from rocket_core.report.schema import CompressionReport
from tests.reference.tiny_models import FAMILIES, byte_tokenizer
from tests.worker.threads import ThreadedAttempt as Attempt
from tests.worker.waiting import PATIENCE, eventually
from worker.processes.linux import EXIT_FENCED_OUT
from worker.reconciler import Reconciler
from worker.runner import Runner

# Two layers are left to compress.
QUICK = {
    "calibration": {"samples": 2, "sequence_length": 16},
    # Few layers, and few steps.
    "options": {"preset": "paper", "ignore": ["*.mlp.*", "*.k_proj", "*.v_proj", "*.o_proj"]},
}
# More than the database ever writes here, less than the model's embeddings.
SMALL_DISK = 2 * 2**20
LARGE_VOCABULARY = 2**15
DAY = 86400.0


class StopAfter(threading.Event):
    """An event that is set after a number of checks."""

    def __init__(self, questions):
        super().__init__()
        self._left = questions

    def is_set(self):
        self._left -= 1
        return self._left < 0


@pytest.fixture
def alter(model):
    """Give the model other weights."""

    def alter():
        other = FAMILIES["llama"]()
        with torch.no_grad():
            other.model.norm.weight.mul_(2)
        other.save_pretrained(model)

    return alter


@pytest.fixture
def attempt(settings, database, claim, look):
    """Claim a job, run it and return it."""

    def attempt(job_id, *, stop=None, own_database=None):
        lease = claim(job_id)
        Attempt(settings, own_database or database, lease, stop or threading.Event()).run(os.getppid())
        return look(job_id)

    return attempt


@pytest.fixture
def quick(submit, model):
    return submit(**QUICK)


def hides_folder(job, folder):
    return str(folder) not in job.error["message"] and str(folder.resolve()) not in job.error["message"]


def weights(files):
    return {name: content for name, content in files.items() if name.endswith(".safetensors")}


@contextmanager
def file_size_limit(limit):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_successful_job_publishes_only_its_results(quick, attempt, published, stored, work, database, messages):
    job = attempt(quick)
    assert (job.status, job.progress, job.attempt) == ("succeeded", 1.0, 1)
    assert 0.2 < job.result["achieved_ratio"] < 0.5
    files = published(quick)
    expected = {
        "report.json",
        "report.html",
        "rocket/model.safetensors",
        "rocket/config.json",
        "rocket/README.md",
    }
    assert expected <= set(files)
    assert len(stored()) == len(files)
    assert list(work.iterdir()) == []
    with database.snapshot() as session:
        layers = outputs.list_layer_profiles(session, quick)
        report = CompressionReport.model_validate(outputs.find_report(session, job).body)
        assert [layer.name for layer in layers] == [layer.name for layer in report.layers]
        assert [name for name, _ in outputs.list_allocation(session, quick)] == [layer.name for layer in layers]
        types = {row.name: row.media_type for row in outputs.list_artifacts(session, job)}
    assert report == CompressionReport.model_validate_json(files["report.json"])
    assert types["rocket/model.safetensors"] == "application/vnd.safetensors"
    assert types["report.json"] == "application/json"
    told = messages(quick)
    assert told[:3] == ["queued", "running", "preflight"]
    assert told[-2:] == ["exporting", "succeeded"]


def test_a_job_without_calibration_succeeds(submit, model, attempt, published, messages):
    job_id = submit(ratio=None, bits=6, options={"preset": "instant"})
    assert attempt(job_id).status == "succeeded"
    report = CompressionReport.model_validate_json(published(job_id)["report.json"])
    assert report.bits_per_weight <= 6
    assert report.calibration.samples == 0
    assert "differentiating" not in messages(job_id)


def test_each_stage_has_its_costs(configure, database, submit, model, claim, look, published):
    settings = configure(measure_energy=True)
    # Longer than the 0.05 s that the meter resolves, however fast the machine is.
    job_id = submit(**QUICK | {"calibration": {"samples": 1024, "sequence_length": 32}})
    Attempt(settings, database, claim(job_id), threading.Event()).run(os.getppid())
    assert look(job_id).status == "succeeded"
    report = CompressionReport.model_validate_json(published(job_id)["report.json"])
    for stage in report.stages:
        assert stage.seconds >= 0, stage.name
        assert stage.device, stage.name
        assert stage.peak_memory_bytes > 0, stage.name
        assert stage.energy is not None, stage.name
    calibrating = next(stage for stage in report.stages if stage.name == "calibrating")
    assert calibrating.energy.kwh > 0
    assert report.energy_kwh >= calibrating.energy.kwh


def test_a_job_publishes_to_s3(configure, model, submit, claim, database, look, work, bucket, s3_settings):
    settings = configure(**s3_settings)
    job_id = submit(**QUICK)
    Attempt(settings, database, claim(job_id), threading.Event()).run(os.getppid())
    job = look(job_id)
    assert (job.status, job.error) == ("succeeded", None)
    with database.snapshot() as session:
        rows = outputs.list_artifacts(session, job)
    assert {"report.json", "rocket/model.safetensors"} <= {row.name for row in rows}
    assert bucket.names() == sorted(f"rocket/test/artifacts/{row.storage_key}" for row in rows)
    for row in rows:
        content = bucket.read(f"rocket/test/artifacts/{row.storage_key}")
        assert (row.size, row.sha256) == (len(content), hashlib.sha256(content).hexdigest()), row.name
    assert list(work.iterdir()) == []
    assert not (settings.data_dir / "artifacts").exists()


def test_an_unavailable_store_only_costs_an_attempt(
    configure, model, submit, claim, database, look, bucket, s3_settings, s3_server
):
    settings = configure(**s3_settings)
    job_id = submit(**QUICK)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        away = settings.model_copy(update={"s3_endpoint_url": f"http://127.0.0.1:{held.getsockname()[1]}"})
        Attempt(away, database, claim(job_id), threading.Event()).run(os.getppid())
    assert look(job_id).status == "queued"
    Attempt(settings, database, claim(job_id), threading.Event()).run(os.getppid())
    assert (look(job_id).status, look(job_id).attempt) == ("succeeded", 2)


def test_a_stopped_job_resumes_and_produces_identical_bytes(
    quick, attempt, submit, published, messages, look, settings
):
    whole = submit(**QUICK)
    attempt(whole)
    # Otherwise there would be little left to do.
    shutil.rmtree(settings.data_dir / "profiles")
    stops = 0
    while look(quick).status == "queued":
        stops += 1
        job = attempt(quick, stop=StopAfter(4 + 3 * stops))
    assert stops > 2
    assert (job.status, job.attempt) == ("succeeded", 1)
    assert weights(published(quick)) == weights(published(whole))
    assert len([message for message in messages(quick) if message.startswith("profiled")]) == 2


def test_a_job_cancelled_while_running_publishes_nothing(quick, attempt, cancel, stored, look):
    stop = StopAfter(6)
    asked = []

    def ask():
        if not asked:
            asked.append(cancel(quick))
        return StopAfter.is_set(stop)

    stop.is_set = ask
    assert attempt(quick, stop=stop).status == "cancelled"
    assert stored() == []


def test_a_job_cancelled_while_storing_keeps_no_artifacts(quick, settings, database, claim, look, stored, cancel):
    class Cancelled(Attempt):
        def _succeed(self, work_key):
            assert len(stored()) == len(self._finished.artifacts)
            cancel(quick)
            super()._succeed(work_key)

    Cancelled(settings, database, claim(quick), threading.Event()).run(os.getppid())
    assert look(quick).status == "cancelled"
    assert stored() == []


def test_a_retry_resumes_from_checkpoints_and_has_their_layers(quick, attempt, cancel, retry, database, messages):
    class CancelAfterProfiles(threading.Event):
        def is_set(self):
            done = sum(message.startswith("profiled") for message in messages(quick)) == 2
            if done:
                cancel(quick)
            return done

    assert attempt(quick, stop=CancelAfterProfiles()).status == "cancelled"
    second = retry(quick)
    job = attempt(second)
    assert job.status == "succeeded"
    assert not [message for message in messages(second) if message.startswith("profiled")]
    with database.snapshot() as session:
        assert len(outputs.list_layer_profiles(session, second)) == 2


def test_a_retry_elsewhere_does_not_keep_layers_of_another_model(
    quick, attempt, alter, cancel, retry, database, settings, claim, look, messages, tmp_path
):
    assert attempt(quick, stop=StopAfter(12)).status == "queued"
    cancel(quick)
    assert [message for message in messages(quick) if message.startswith("profiled")]
    second = retry(quick)
    alter()
    elsewhere = settings.model_copy(update={"data_dir": tmp_path / "elsewhere", "models_dir": settings.models_folder})
    for stop in (StopAfter(12), threading.Event()):
        Attempt(elsewhere, database, claim(second), stop).run(os.getppid())
    assert look(second).status == "succeeded"
    told = messages(second)
    assert sum("starts afresh" in message for message in told) == 1
    profiled = [message for message in told if message.startswith("profiled")]
    assert len(profiled) == len(set(profiled)) == 2
    with database.snapshot() as session:
        report = outputs.find_report(session, look(second)).body
        chosen = dict(outputs.list_allocation(session, second))
        assert len(outputs.list_layer_profiles(session, second)) == 2
    assert {layer["name"]: layer["reconstruction_error"] for layer in report["layers"]} == pytest.approx(
        {name: candidate.reconstruction_error for name, candidate in chosen.items()}
    )


def test_a_missing_model_fails_the_job(quick, attempt, model, tmp_path):
    shutil.rmtree(model)
    job = attempt(quick)
    assert (job.status, job.error["code"], job.error["retryable"]) == ("failed", "model_not_found", False)
    assert hides_folder(job, tmp_path)


def test_a_damaged_model_is_named_as_the_client_knows_it(quick, attempt, model, tmp_path):
    with (model / "model.safetensors").open("r+b") as stream:
        stream.truncate(1000)
    job = attempt(quick)
    assert (job.status, job.error["stage"]) == ("failed", "preflight")
    assert "local/tiny" in job.error["message"]
    assert hides_folder(job, tmp_path)


def test_a_locked_work_folder_is_retried(quick, attempt, look, work, tmp_path):
    folder = work / look(quick).work_key / "out" / ".rocket-work"
    folder.mkdir(parents=True)
    with (folder / "lock").open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        job = attempt(quick)
        assert (job.status, job.attempt) == ("queued", 1)
    assert attempt(quick).status == "succeeded"


@pytest.mark.parametrize("exhaust", [lambda *_: torch.empty(2**50), lambda *_: bytearray(2**60)])
def test_running_out_of_memory_fails_the_job_for_good(quick, attempt, monkeypatch, stored, tmp_path, exhaust):
    monkeypatch.setattr(torch.linalg, "eigh", exhaust)
    job = attempt(quick)
    assert (job.status, job.attempt, job.error["code"]) == ("failed", 1, "insufficient_memory")
    assert not job.error["retryable"]
    assert job.error["stage"] == "calibrating"
    assert hides_folder(job, tmp_path)
    assert stored() == []


def test_a_full_disk_fails_the_job_and_leaves_no_partial_file(quick, attempt, settings, stored, tmp_path, submit, work):
    large = FAMILIES["llama"]()
    large.resize_token_embeddings(LARGE_VOCABULARY)
    large.save_pretrained(settings.models_folder / "large")
    byte_tokenizer().save_pretrained(settings.models_folder / "large")
    job_id = submit(**QUICK, model_id="local/large")
    with file_size_limit(SMALL_DISK):
        job = attempt(job_id)
    assert (job.status, job.error["code"], job.error["stage"]) == ("failed", "disk_full", "exporting")
    assert hides_folder(job, tmp_path)
    assert stored() == []
    assert [path for path in work.rglob("*") if path.name.endswith((".partial", ".tmp"))] == []
    assert attempt(quick).status == "succeeded"


def test_a_full_artifact_store_fails_the_job_and_keeps_no_file(
    quick, settings, database, claim, look, stored, monkeypatch
):
    real, calls = os.link, []

    def link(*arguments, **options):
        calls.append(1)
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        return real(*arguments, **options)

    monkeypatch.setattr(os, "link", link)
    Attempt(settings, database, claim(quick), threading.Event()).run(os.getppid())
    assert (look(quick).status, look(quick).error["code"]) == ("failed", "disk_full")
    assert stored() == []


def test_an_attempt_with_another_models_checkpoints_fails(quick, attempt, alter, tmp_path):
    assert attempt(quick, stop=StopAfter(8)).status == "queued"
    alter()
    job = attempt(quick)
    assert (job.status, job.error["code"]) == ("failed", "stale_work_folder")
    assert hides_folder(job, tmp_path)


@pytest.mark.parametrize("ended", ["half way", "at the end"])
def test_a_retry_with_useless_checkpoints_starts_over(
    quick, alter, retry, cancel, messages, published, database, settings, claim, look, ended
):
    class CancelledAtTheEnd(Attempt):
        def _succeed(self, work_key):
            cancel(quick)
            super()._succeed(work_key)

    class Afresh(Attempt):
        def _start_afresh(self, output, reason):
            working_directory = output.parent / "empty"
            working_directory.mkdir()
            super()._start_afresh(output, reason)
            assert working_directory.exists()

    lease = claim(quick)
    if ended == "half way":
        cancel(quick)
        Attempt(settings, database, lease, StopAfter(8)).run(os.getppid())
    else:
        CancelledAtTheEnd(settings, database, lease, threading.Event()).run(os.getppid())
    assert look(quick).status == "cancelled"
    alter()
    second = retry(quick)
    Afresh(settings, database, claim(second), threading.Event()).run(os.getppid())
    assert look(second).status == "succeeded"
    assert any("starts afresh" in message for message in messages(second))
    with database.snapshot() as session:
        assert len(outputs.list_layer_profiles(session, second)) == 2
    assert published(second)


def test_a_job_reclaimed_from_its_worker_publishes_nothing(quick, settings, database, claim, stored, look):
    class Reclaimed(Attempt):
        def _succeed(self, work_key):
            with database.transaction() as session:
                sweeps.reclaim_claimed(session)
            super()._succeed(work_key)

    with pytest.raises(FencedOutError):
        Reclaimed(settings, database, claim(quick), threading.Event()).run(os.getppid())
    assert look(quick).status == "queued"
    assert stored() == []


def test_a_commit_without_response_keeps_the_artifacts(quick, settings, attempt, published, look):
    class Unacknowledged(Database):
        """A database that commits but once reports that it does not answer."""

        has_failed = False

        @contextmanager
        def transaction(self):
            with super().transaction() as session:
                yield session
            if not self.has_failed and look(quick).status == Status.SUCCEEDED:
                self.has_failed = True
                raise DatabaseUnavailableError("the connection was lost")

    unacknowledged = Unacknowledged(settings.database)
    with pytest.raises(FencedOutError):
        attempt(quick, own_database=unacknowledged)
    unacknowledged.close()
    assert look(quick).status == "succeeded"
    assert "rocket/model.safetensors" in published(quick)


@pytest.mark.parametrize("fault", ["fence", "parent"])
def test_a_process_without_a_claim_ends_at_once(settings, quick, claim, look, fault):
    lease = claim(quick)
    fence, parent = ("0" * 32, os.getpid()) if fault == "fence" else (lease.fence, 1)
    command = [sys.executable, "-m", "worker.attempt.job", quick, fence, str(parent)]
    ended = subprocess.run(command, env={**os.environ, **settings.environment()}, timeout=PATIENCE, check=False)
    assert ended.returncode == EXIT_FENCED_OUT
    assert look(quick).status == "running"


@pytest.mark.soak  # `test_warm_job` cancels a forked process.
def test_a_cancelled_process_releases_its_job_in_time(configure, database, submit, model, look, cancel, messages):
    job_id = submit(calibration=QUICK["calibration"])
    runner = Runner(configure(cancel_grace_seconds=60), database)
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    eventually(lambda: look(job_id).stage == "calibrating")
    cancel(job_id)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    job = look(job_id)
    assert (job.status, job.error) == ("cancelled", None)
    # A retry resumes from there.
    assert job.work_key is not None


def test_a_job_killed_while_publishing_succeeds_next_time(
    settings, database, quick, program, look, published, stored, work, monkeypatch
):
    killed = program(
        """
        from worker.attempt import job
        job.ArtifactPublisher.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        job.main()
        """
    )
    assert Runner(settings, database, killed).run()
    assert (look(quick).status, look(quick).attempt) == ("queued", 1)
    left_behind = stored()
    assert left_behind
    assert Runner(settings, database).run()
    assert (look(quick).status, look(quick).attempt) == ("succeeded", 2)
    files = published(quick)
    assert len(stored()) == len(left_behind) + len(files)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + DAY)
    Reconciler(settings, database).clean()
    assert published(quick) == files
    assert len(stored()) == len(files)
    assert list(work.iterdir()) == []
