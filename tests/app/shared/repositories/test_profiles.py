"""Retention of profiles: no active job loses its own, whatever other transactions do."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta

import pytest
from sqlalchemy import String, cast, func, select

from app.shared.models import Job, Profile
from app.shared.outcomes import JobError
from app.shared.repositories import jobs, leases, outputs, profiles

pytestmark = pytest.mark.databases("sqlite", "postgres")

DAY = timedelta(days=1)
MANY = 1000


class Profiling:
    """Operations of jobs and sweeps on profiles; a profile is identified by one digit."""

    def __init__(self, database, submit, model_profile):
        self.database, self.submit, self.model_profile = database, submit, model_profile
        predictor = model_profile.predictor()
        self._told = predictor.frontier(), predictor.reachable_ratio

    def do(self, function, *arguments, **options):
        with self.database.transaction() as session:
            return function(session, *arguments, **options)

    def claim(self, **options):
        return self.do(leases.claim_job, self.submit(**options), worker="w", lease_seconds=60)

    def save_in(self, session, lease, name, most=MANY):
        model = self.model_profile.model_copy(update={"fingerprint": name * 64})
        return profiles.save_profile(session, lease, model, *self._told, most=most)

    def save(self, lease, name, most=MANY):
        return self.do(self.save_in, lease, name, most)

    def finish(self, lease):
        self.do(outputs.succeed_without_files, lease)

    def job(self, name, most=MANY, **options):
        """Run a job to its end; return its id and that of its profile."""
        lease = self.claim(**options)
        profile_id = self.save(lease, name, most)
        self.finish(lease)
        return lease.job_id, profile_id

    def sweep(self, retention=DAY, **options):
        return self.do(profiles.delete_unused, retention=retention, **options)

    def left(self):
        """Return the first digits of all fingerprints."""
        with self.database.snapshot() as session:
            return "".join(sorted(name[0] for name in session.scalars(select(Profile.fingerprint))))

    def profile_of(self, job_id):
        return self.do(jobs.get_job, job_id).profile_id


@pytest.fixture
def profiling(database, submit, model_profile):
    return Profiling(database, submit, model_profile)


def test_the_least_recently_used_profile_is_evicted(profiling, clock):
    made = {}
    for name in "ab":
        made[name] = profiling.job(name, most=2)
        clock.advance(1)
    assert profiling.job("a", most=2)[1] == made["a"][1]
    clock.advance(1)
    profiling.job("c", most=2)
    assert profiling.left() == "ac"
    assert profiling.profile_of(made["a"][0]) == made["a"][1]
    assert profiling.profile_of(made["b"][0]) is None
    assert profiling.do(jobs.get_job, made["b"][0]).status == "succeeded"


def test_a_reused_profile_takes_no_extra_room(profiling, clock):
    for name in "abba":
        profiling.job(name, most=2)
        clock.advance(1)
    assert profiling.left() == "ab"


def test_a_tenant_evicts_only_its_own_profiles(profiling, clock):
    profiling.job("a", most=1, owner="other")
    clock.advance(1)
    profiling.job("b", most=1)
    profiling.job("c", most=1)
    assert profiling.left() == "ac"


def test_profiles_of_active_jobs_survive_quota_and_retention(profiling, clock):
    queued, running, cancelling = (profiling.claim() for _ in range(3))
    for lease, name in ((queued, "a"), (running, "b"), (cancelling, "c")):
        profiling.save(lease, name, most=1)
        clock.advance(1)
    profiling.do(leases.fail_job, queued, JobError(code="x", message="m", retryable=True))
    profiling.do(jobs.cancel_job, cancelling.job_id)
    clock.advance(2 * DAY.total_seconds())
    assert profiling.sweep() == 0
    profiling.job("d", most=1)
    assert profiling.left() == "abcd"
    profiling.do(jobs.cancel_job, queued.job_id)
    profiling.finish(running)
    profiling.do(leases.release_job, cancelling)
    profiling.job("e", most=1)
    assert profiling.left() == "e"


def test_a_profile_expires_when_no_job_has_used_it_for_long(profiling, clock):
    job_id, _ = profiling.job("a")
    profiling.job("b")
    clock.advance(DAY.total_seconds() / 2)
    profiling.job("b")
    assert profiling.sweep() == 0
    clock.advance(DAY.total_seconds() / 2)
    assert profiling.sweep() == 1
    assert profiling.left() == "b"
    assert profiling.profile_of(job_id) is None
    clock.advance(DAY.total_seconds() / 2)
    assert profiling.sweep() == 1
    assert profiling.left() == ""


def test_the_end_of_a_job_counts_as_use_of_its_profile(profiling, clock):
    lease = profiling.claim()
    profiling.save(lease, "a")
    clock.advance(2 * DAY.total_seconds())
    profiling.finish(lease)
    assert profiling.sweep() == 0
    clock.advance(DAY.total_seconds())
    assert profiling.sweep() == 1


def test_a_profile_whose_jobs_are_deleted_is_retained_as_long(profiling, clock):
    job_id, _ = profiling.job("a")
    profiling.do(jobs.delete_job, job_id)
    assert profiling.sweep() == 0
    clock.advance(DAY.total_seconds())
    assert profiling.sweep() == 1


def test_all_expired_profiles_are_deleted_in_batches(profiling, clock):
    for name in "abcde":
        profiling.job(name)
    clock.advance(DAY.total_seconds())
    assert [profiling.sweep(limit=2) for _ in range(4)] == [2, 2, 1, 0]
    assert profiling.left() == ""


def test_a_job_recreates_a_profile_deleted_during_its_lookup(profiling, clock):
    _, old = profiling.job("a")
    clock.advance(DAY.total_seconds())
    lease, found = profiling.claim(), []
    job = threading.Thread(target=lambda: found.append(profiling.save(lease, "a")))
    with profiling.database.transaction() as session:
        assert profiles.delete_unused(session, retention=DAY) == 1
        job.start()
        # It waits for this transaction to end.
        time.sleep(0.2)
        assert found == []
    job.join(20)
    assert found == [profiling.profile_of(lease.job_id)] != [old]
    assert profiling.left() == "a"


def test_a_profile_being_looked_up_is_not_deleted(profiling, clock, database_kind):
    _, old = profiling.job("a")
    clock.advance(DAY.total_seconds())
    lease, other, swept = profiling.claim(), profiling.claim(), []

    def sweep():
        swept.append(profiling.sweep())
        profiling.save(other, "b", most=1)

    sweeping = threading.Thread(target=sweep)
    with profiling.database.transaction() as session:
        assert profiling.save_in(session, lease, "a") == old
        sweeping.start()
        # SQLite has one writer at a time; with several, none of them waits for what it would delete.
        sweeping.join(20 if database_kind == "postgres" else 0.2)
        assert sweeping.is_alive() == (database_kind == "sqlite")
    sweeping.join(20)
    assert swept == [0]
    assert profiling.left() == "ab"
    assert profiling.profile_of(lease.job_id) == old


@pytest.mark.databases("postgres")  # where others write while a statement reads
def test_a_profile_found_after_its_selection_is_not_deleted(profiling):
    _, old = profiling.job("a")
    lease, deleted = profiling.claim(), []
    # Takes time over each row, and then finds it changed.
    slow = select(Profile.id).where(cast(func.pg_sleep(0.5), String) == "")

    def delete():
        deleted.append(profiling.do(profiles._delete_unless_named, slow, Job.finished_at.is_(None)))

    deleting = threading.Thread(target=delete)
    deleting.start()
    time.sleep(0.2)
    assert profiling.save(lease, "a") == old
    deleting.join(20)
    assert deleted == [0]
    assert profiling.profile_of(lease.job_id) == old


def test_an_active_job_is_never_without_its_profile(profiling):
    done, chance = threading.Event(), random.Random()

    def work():
        for _ in range(8):
            lease = profiling.claim()
            mine = profiling.save(lease, chance.choice("abc"), most=1)
            for _ in range(3):
                assert profiling.profile_of(lease.job_id) == mine
            profiling.finish(lease)

    def sweep():
        while not done.is_set():
            profiling.sweep(timedelta(0))
            time.sleep(0.001)

    with ThreadPoolExecutor() as pool:
        sweepers = [pool.submit(sweep) for _ in range(2)]
        workers = [pool.submit(work) for _ in range(3)]
        wait(workers)
        done.set()
        for thread in (*workers, *sweepers):
            thread.result()
