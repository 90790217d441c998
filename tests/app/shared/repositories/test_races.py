"""Races of a client's cancellation with a worker's transactions: one is first, and both know it."""

import random
import threading
import time
from datetime import timedelta

import pytest

from app.shared.errors import ConflictError, FencedOutError
from app.shared.lifecycle import Status
from app.shared.outcomes import JobError
from app.shared.repositories import events, jobs, leases, outputs

pytestmark = pytest.mark.databases("sqlite", "postgres")


BROKEN = JobError(code="x", message="m", retryable=True)


@pytest.fixture
def worker_does(database, profile, result, report, artifact):
    """Return the transactions of a worker, by name."""

    def write(function, **options):
        def written(lease):
            with database.transaction() as session:
                return function(session, lease, **options)

        return written

    success = {"result": result, "report": report, "artifacts": [artifact], "retention": timedelta(days=1)}
    return {
        "the last layer": write(outputs.save_layer_profile, position=0, profile=profile("a")),
        "finish": write(outputs.succeed_job, **success),
        "fail": write(leases.fail_job, error=BROKEN),
        "release": write(leases.release_job),
    }


@pytest.fixture
def claim(database):
    def claim(job_id):
        with database.transaction() as session:
            return leases.claim_job(session, job_id, worker="w", lease_seconds=60)

    return claim


@pytest.fixture
def cancel(database):
    def cancel(job_id):
        try:
            with database.transaction() as session:
                return jobs.cancel_job(session, job_id).status
        except ConflictError:
            return "too late"

    return cancel


@pytest.fixture
def assert_ended_once(database):
    def assert_ended_once(job_id):
        with database.snapshot() as session:
            job = jobs.get_job(session, job_id)
            told = [event.data["status"] for event in events.list_events(session, job_id) if event.type == "status"]
            published = outputs.list_artifacts(session, job)
            report = outputs.find_report(session, job)
        assert [status for status in told if Status(status).is_terminal] == [job.status]
        assert told[-1] == job.status
        assert (len(published) == 1) == (report is not None) == (job.status == "succeeded")
        assert job.fence is None

    return assert_ended_once


class Duel:
    """Two transactions: the first stays open until the second has started to wait for it, or could have."""

    def __init__(self, monkeypatch, module, name):
        self._inside, self._second_began = threading.Event(), threading.Event()
        self._first = None
        real = getattr(module, name)

        def pausing(*arguments, **options):
            answer = real(*arguments, **options)
            if threading.current_thread() is self._first:
                self._inside.set()
                assert self._second_began.wait(10)
                time.sleep(0.05)
            return answer

        monkeypatch.setattr(module, name, pausing)

    def fight(self, first, second):
        answers = {}
        self._first = threading.Thread(target=lambda: answers.update(first=first()))
        self._first.start()
        assert self._inside.wait(10)

        def follow():
            self._second_began.set()
            answers.update(second=second())

        follower = threading.Thread(target=follow)
        follower.start()
        self._first.join()
        follower.join()
        return answers["first"], answers["second"]


def settle(database, lease):
    """Do what the worker does next: its heartbeat tells it to stop, and it releases the job."""
    with database.transaction() as session:
        assert leases.heartbeat(session, lease, lease_seconds=60) == Status.CANCELLING
        assert leases.release_job(session, lease) == Status.CANCELLED


@pytest.mark.parametrize("first", ["client", "worker"])
def test_cancelling_races_with_a_claim(monkeypatch, database, submit, claim, cancel, assert_ended_once, first):
    job_id = submit()
    if first == "client":
        status, lease = Duel(monkeypatch, jobs, "_locked").fight(lambda: cancel(job_id), lambda: claim(job_id))
        assert (status, lease) == ("cancelled", None)
    else:
        lease, status = Duel(monkeypatch, leases, "move").fight(lambda: claim(job_id), lambda: cancel(job_id))
        assert (status, lease is None) == ("cancelling", False)
        settle(database, lease)
    assert_ended_once(job_id)


@pytest.mark.parametrize(
    ("deed", "if_client_first", "if_worker_first"),
    [
        ("the last layer", ("cancelling", True), (True, "cancelling")),
        ("finish", ("cancelling", "cancelled"), ("succeeded", "too late")),
        ("fail", ("cancelling", "cancelled"), ("queued", "cancelled")),
        ("release", ("cancelling", "cancelled"), ("queued", "cancelled")),
    ],
)
@pytest.mark.parametrize("first", ["client", "worker"])
def test_cancelling_races_with_a_write(
    monkeypatch, database, submit, claim, cancel, worker_does, assert_ended_once, deed, if_client_first,
    if_worker_first, first,
):  # fmt: skip
    job_id = submit()
    lease = claim(job_id)

    def write():
        return worker_does[deed](lease)

    if first == "client":
        duel = Duel(monkeypatch, jobs, "_locked")
        assert duel.fight(lambda: cancel(job_id), write) == if_client_first
    else:
        duel = Duel(monkeypatch, leases if deed in {"fail", "release"} else outputs, "lock_leased_job")
        assert duel.fight(write, lambda: cancel(job_id)) == if_worker_first
    if deed == "the last layer":
        settle(database, lease)
    assert_ended_once(job_id)


def test_cancelling_at_any_moment_ends_every_job_once(database, submit, claim, cancel, worker_does, assert_ended_once):
    chance = random.Random()
    for _ in range(20):
        job_id, together, pauses = submit(), threading.Barrier(2), [chance.uniform(0, 0.01) for _ in range(3)]

        def work(job_id=job_id, together=together, pauses=pauses):
            together.wait()
            lease = claim(job_id)
            if lease is None:
                return
            time.sleep(pauses[0])
            worker_does["the last layer"](lease)
            time.sleep(pauses[1])
            worker_does["finish"](lease)

        def cancel_later(job_id=job_id, together=together, pauses=pauses):
            together.wait()
            time.sleep(3 * pauses[2])
            cancel(job_id)

        threads = [threading.Thread(target=work), threading.Thread(target=cancel_later)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_ended_once(job_id)
        with database.transaction() as session:
            # The next one stores a file of the same name.
            jobs.delete_job(session, job_id)


def test_of_two_workers_that_finish_one_job_only_one_writes(
    monkeypatch, database, submit, claim, worker_does, assert_ended_once
):
    """A worker finishes just as its job is reclaimed, and another worker finishes it."""
    from app.shared.repositories import sweeps

    job_id = submit()
    lease = claim(job_id)

    def finish():
        try:
            return worker_does["finish"](lease)
        except FencedOutError:
            return "fenced out"

    def take():
        with database.transaction() as session:
            return sweeps.reclaim_claimed(session)

    taken, finished = Duel(monkeypatch, sweeps, "append_event").fight(take, finish)
    assert (taken, finished) == ([job_id], "fenced out")
    assert worker_does["finish"](claim(job_id)) == "succeeded"
    assert_ended_once(job_id)
