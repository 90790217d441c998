import time
from datetime import timedelta

import pytest
from sqlalchemy import select, text

from app.shared.database import Database, now, upgrade
from app.shared.models import Profile, Upload
from app.shared.outcomes import JobError, JobResult, NewArtifact
from app.shared.repositories import keys, leases, outputs, profiles, sessions, sweeps
from app.shared.storage import WorkFolders, open_store
from rocket_core.allocation.predictor import ModelProfile
from rocket_core.report.schema import CompressionReport
from tests.worker.waiting import eventually
from worker.reconciler import Reconciler

DAY = 86400.0
# Result and report of a job, which are not read here.
SUCCESS = {
    "result": JobResult(achieved_ratio=0, kept_parameters=0, compressible_parameters=0, stored_bytes=0, dense_bytes=0),
    "report": CompressionReport.model_construct(),
}


@pytest.fixture
def reconcile(database):
    """Return a reconciler for some settings."""
    return lambda settings, rows=database: Reconciler(settings, rows)


@pytest.fixture
def reconciler(reconcile, settings):
    return reconcile(settings)


@pytest.fixture
def notified(database):
    """Return a function for the jobs that a relay would notify workers of; calling it marks them as notified."""

    def notified():
        with database.transaction() as session:
            waiting = sweeps.list_notifications(session)
            sweeps.delete_notifications(session, waiting)
        return [row.job_id for row in waiting]

    return notified


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_job_that_nobody_heard_of_is_notified_again(reconcile, configure, submit, notified):
    job_id = submit()
    reconciler = reconcile(configure(notify_seconds=1))
    reconciler.sweep()
    assert notified() == [job_id]
    began = time.monotonic()
    assert eventually(lambda: reconciler.sweep() or notified()) == [job_id]
    assert time.monotonic() - began > 0.5


def test_only_jobs_with_an_expired_lease_are_reclaimed(reconciler, submit, claim, look):
    silent, alive = submit(), submit()
    claim(silent, lease_seconds=0)
    claim(alive)
    reconciler.sweep()
    assert (look(silent).status, look(silent).attempt) == ("queued", 1)
    assert look(alive).status == "running"


def test_after_a_suspension_jobs_have_a_lease_to_report(reconcile, configure, submit, claim, look, monkeypatch):
    job_id = submit()
    reconciler = reconcile(configure(lease_seconds=2))
    claim(job_id, lease_seconds=2)
    reconciler.sweep()
    # While a machine sleeps the time of day advances, and the monotonic clock does not.
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    woken = time.monotonic()
    reconciler.sweep()
    assert look(job_id).status == "running"
    eventually(lambda: reconciler.sweep() or look(job_id).status == "queued")
    assert time.monotonic() - woken >= 2


def test_files_without_a_row_are_removed_once_they_are_old(reconcile, settings, submit, look, tmp_path, monkeypatch):
    artifacts, work = open_store(settings), WorkFolders(settings.data_dir / "work")
    source = tmp_path / "source"
    source.write_text("x")
    orphan = artifacts.put(source).key
    used, unused = look(submit()).work_key, "c" * 32
    for key in (used, unused):
        (work.path(key) / "file").write_text("x")
    reconcile(settings).clean()
    assert names(settings.data_dir / "artifacts") == [orphan]
    assert names(settings.data_dir / "work") == sorted([used, unused])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + DAY)
    reconcile(settings).clean()
    assert names(settings.data_dir / "artifacts") == []
    assert names(settings.data_dir / "work") == [used]


def test_files_of_another_database_are_not_removed(reconcile, settings, tmp_path, monkeypatch, caplog):
    file = settings.data_dir / "artifacts" / ("a" * 32)
    reconcile(settings).clean()
    file.touch()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + DAY)
    another = Database(f"sqlite+pysqlite:///{tmp_path}/another.sqlite3")
    upgrade(f"sqlite+pysqlite:///{tmp_path}/another.sqlite3")
    reconcile(settings, another).clean()
    another.close()
    assert file.exists()
    assert "another database" in caplog.text
    reconcile(settings).clean()
    assert not file.exists()


def test_the_sweep_of_a_bucket_keeps_artifacts_and_uploads(
    reconcile, configure, bucket, s3_settings, database, submit, claim, monkeypatch
):
    settings = configure(**s3_settings)
    store = open_store(settings)
    artifact, upload, orphan = (store.put_stream([word], max_bytes=9) for word in (b"artifact", b"upload", b"orphan"))
    lease = claim(submit())
    described = NewArtifact(name="file", storage_key=artifact.key, size=artifact.size, sha256=artifact.sha256)
    row = {"storage_key": upload.key, "sha256": upload.sha256, "size": upload.size, "suffix": ".txt", "documents": 1}
    with database.transaction() as session:
        outputs.succeed_job(session, lease, artifacts=[described], retention=timedelta(days=9), **SUCCESS)
        session.add(Upload(owner="local", id=upload.sha256[:32], created_at=now(session), **row))
    bucket.begin_upload(f"rocket/test/artifacts/{'e' * 32}")
    bucket.begin_upload("another/service")
    real = time.time
    reconcile(settings).clean()
    assert set(store.keys(before=real() + 60)) == {artifact.key, upload.key, orphan.key}
    assert len(bucket.unfinished()) == 2
    monkeypatch.setattr(time, "time", lambda: real() + 2 * DAY)
    reconcile(settings).clean()
    assert set(store.keys(before=real() + 60)) == {artifact.key, upload.key}
    assert bucket.unfinished() == ["another/service"]


def test_a_bucket_of_another_database_is_not_swept(reconcile, configure, bucket, s3_settings, monkeypatch, caplog):
    settings = configure(**s3_settings)
    bucket.write("rocket/test/database", b"of another service")
    orphan = open_store(settings).put_stream([b"x"], max_bytes=1).key
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 2 * DAY)
    reconcile(settings).clean()
    assert open_store(settings).keys(before=real() + 60) == [orphan]
    assert "another database" in caplog.text


def test_a_file_that_cannot_be_removed_does_not_block_the_others(reconcile, settings, monkeypatch, caplog):
    store = settings.data_dir / "artifacts"
    reconciler = reconcile(settings)
    # Folders where files are expected.
    for letter in "abc":
        (store / (letter * 32)).mkdir()
    (store / ("d" * 32)).touch()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + DAY)
    reconciler.clean()
    assert names(store) == [letter * 32 for letter in "abc"]
    assert "a" * 32 in caplog.text


def test_all_expired_artifacts_are_removed(reconciler, settings, database, submit, claim, look, tmp_path):
    store = open_store(settings)
    source = tmp_path / "source"
    source.write_text("x")
    expired, kept = submit(), submit()
    # More files than one transaction expires.
    for job_id, number, retention in ((expired, 120, timedelta(0)), (kept, 1, timedelta(days=1))):
        stored = [store.put(source) for _ in range(number)]
        artifacts = [
            NewArtifact(name=f"file{index}", storage_key=file.key, size=file.size, sha256=file.sha256)
            for index, file in enumerate(stored)
        ]
        lease = claim(job_id)
        with database.transaction() as session:
            outputs.succeed_job(session, lease, artifacts=artifacts, retention=retention, **SUCCESS)
    reconciler.clean()
    assert len(names(settings.data_dir / "artifacts")) == 1
    with database.snapshot() as session:
        assert {row.storage_key for row in outputs.list_artifacts(session, look(expired))} == {None}
        assert names(settings.data_dir / "artifacts") == [outputs.list_artifacts(session, look(kept))[0].storage_key]


def test_cleaning_is_less_frequent_than_sweeping(reconciler, submit, notified, settings, database):
    reconciler.sweep()
    folder = settings.data_dir / "artifacts" / ("d" * 32)
    folder.touch()
    with database.transaction() as session:
        session.execute(text("DELETE FROM outbox"))
    job_id = submit()
    reconciler.sweep()
    assert notified() == [job_id]
    assert folder.exists()


def test_only_jobs_past_their_retention_are_deleted_with_files(
    reconcile, configure, database, submit, claim, look, tmp_path
):
    settings = configure(job_retention_days=1, artifact_retention_days=300)
    store, work = open_store(settings), WorkFolders(settings.data_dir / "work")
    source = tmp_path / "source"
    source.write_text("x")
    succeeded, failed, young, waiting = (submit() for _ in range(4))
    failed_work = look(failed).work_key
    (work.path(failed_work) / "file").write_text("x")
    stored = store.put(source)
    with database.transaction() as session:
        artifact = NewArtifact(name="file", storage_key=stored.key, size=stored.size, sha256=stored.sha256)
        lease = leases.claim_job(session, succeeded, worker="w", lease_seconds=60)
        outputs.succeed_job(session, lease, artifacts=[artifact], retention=timedelta(days=300), **SUCCESS)
        for job_id in (failed, young):
            lease = leases.claim_job(session, job_id, worker="w", lease_seconds=60)
            leases.fail_job(session, lease, JobError(code="x", message="broken"))
        long_ago = text("UPDATE jobs SET finished_at = datetime('now', '-25 hours') WHERE id IN (:one, :other)")
        session.execute(long_ago, {"one": succeeded, "other": failed})
    reconcile(configure()).clean()
    assert look(succeeded).status == "succeeded"
    reconcile(settings).clean()
    with database.snapshot() as session:
        left = session.scalars(text("SELECT id FROM jobs ORDER BY id")).all()
        rows = "SELECT job_id FROM artifacts UNION SELECT job_id FROM reports UNION SELECT job_id FROM job_events"
        of_jobs = set(session.scalars(text(rows)))
    assert left == sorted([young, waiting])
    assert of_jobs == set(left)
    assert names(settings.data_dir / "artifacts") == names(settings.data_dir / "work") == []


def test_unused_profiles_are_deleted_after_their_retention(reconcile, configure, database, submit, claim, look):
    old, used, under_way = (submit() for _ in range(3))
    saved = {}
    for number, job_id in enumerate((old, used, under_way)):
        lease = claim(job_id)
        # Its content is not read here.
        model = ModelProfile.model_construct(fingerprint=str(number) * 64, layers=())
        with database.transaction() as session:
            saved[job_id] = profiles.save_profile(session, lease, model, (), 0.0, most=3)
            if job_id != under_way:
                outputs.succeed_without_files(session, lease)
    with database.transaction() as session:
        long_ago = "datetime('now', '-25 hours')"
        both = {"old": old, "under_way": under_way}
        session.execute(
            text(
                f"UPDATE profiles SET used_at = {long_ago} "  # noqa: S608
                "WHERE id IN (SELECT profile_id FROM jobs WHERE id IN (:old, :under_way))"
            ),
            both,
        )
        session.execute(text(f"UPDATE jobs SET finished_at = {long_ago} WHERE id = :old"), {"old": old})  # noqa: S608
    reconcile(configure()).clean()
    assert {job_id: look(job_id).profile_id for job_id in saved} == saved
    reconcile(configure(profile_retention_days=1)).clean()
    assert {job_id: look(job_id).profile_id for job_id in saved} == saved | {old: None}
    with database.snapshot() as session:
        assert set(session.scalars(select(Profile.id))) == {saved[used], saved[under_way]}


def test_only_expired_sessions_are_deleted(reconciler, database):
    with database.transaction() as session:
        key = keys.create_key(session, "alice").row.id
        lifetimes = (timedelta(0), timedelta(hours=1))
        _, lasting = (sessions.open_session(session, key, lifetime=lifetime).row.id for lifetime in lifetimes)
    reconciler.clean()
    with database.snapshot() as session:
        assert [row.id for row, _ in sessions.list_sessions(session)] == [lasting]
