import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from sqlalchemy import select, text

from app.shared.database import Database
from app.shared.models import Job
from app.shared.repositories import leases, sweeps
from app.shared.repositories.leases import Lease
from tests.worker.waiting import eventually
from worker.attempt.lease import LeaseKeeper
from worker.processes.linux import EXIT_FENCED_OUT

# The shortest possible lease; renewed every half second.
LEASE_SECONDS = 2.0


@pytest.fixture
def settings(configure):
    return configure(lease_seconds=LEASE_SECONDS)


@pytest.fixture
def held(submit, claim):
    return claim(submit(), lease_seconds=LEASE_SECONDS)


@pytest.fixture
def own_database(settings):
    database = Database(settings.database)
    yield database
    database.close()


@pytest.fixture
def keep(configure, own_database):
    """Return a function that makes keepers, which record their events and do not end this process."""

    def keep(lease, parent=None, lease_seconds=LEASE_SECONDS):
        keeper = LeaseKeeper(
            own_database,
            lease,
            configure(lease_seconds=lease_seconds),
            parent=os.getppid() if parent is None else parent,
            on_stop=stop.set,
            on_lost=lost.set,
        )
        keeper.stop, keeper.lost = stop, lost
        return keeper

    stop, lost = threading.Event(), threading.Event()
    return keep


def test_a_lease_is_renewed_only_while_it_is_kept(database, keep, held, look):
    first = look(held.job_id).lease_until
    with keep(held) as keeper:
        eventually(lambda: (look(held.job_id).lease_until - first).total_seconds() > LEASE_SECONDS)
        with database.transaction() as session:
            assert sweeps.reclaim_expired(session) == []
        assert not keeper.lost.is_set()
        assert not keeper.stop.is_set()
    last = look(held.job_id).lease_until
    time.sleep(0.7)
    assert look(held.job_id).lease_until == last


def test_a_cancellation_sets_the_stop_event(keep, held, cancel):
    with keep(held) as keeper:
        cancel(held.job_id)
        assert keeper.stop.wait(10)
        assert not keeper.lost.is_set()


def test_a_fenced_out_keeper_reports_the_loss(keep, held, database):
    with database.transaction() as session:
        sweeps.reclaim_claimed(session)
    # Long before a lease has expired.
    with keep(held, lease_seconds=600) as keeper:
        assert keeper.lost.wait(20)


def test_a_wrong_fence_reports_the_loss(keep, held):
    with keep(Lease(job_id=held.job_id, fence="0" * 32), lease_seconds=600) as keeper:
        assert keeper.lost.wait(20)


def test_a_lease_is_lost_after_its_length_without_a_database(keep, held, database, own_database, outage):
    with keep(held) as keeper:
        began = time.monotonic()
        outage.begin(database, own_database)
        assert keeper.lost.wait(20)
        assert LEASE_SECONDS - 1 < time.monotonic() - began < LEASE_SECONDS + 5
    outage.end()


def test_a_short_database_outage_does_not_lose_the_lease(keep, held, database, own_database, outage, look, caplog):
    with keep(held) as keeper:
        outage.begin(database, own_database)
        eventually(lambda: "renewing the lease" in caplog.text)
        outage.end()
        back = look(held.job_id).lease_until
        eventually(lambda: look(held.job_id).lease_until > back)
        assert not keeper.lost.is_set()


def test_an_unexpected_error_does_not_stop_renewals(keep, held, database, look, caplog):
    with keep(held) as keeper:
        before = look(held.job_id).lease_until
        with database.transaction() as session:
            session.execute(
                text("CREATE TRIGGER bug BEFORE UPDATE ON jobs BEGIN SELECT RAISE(ABORT, 'not foreseen'); END")
            )
        eventually(lambda: "unexpected error while renewing the lease" in caplog.text)
        with database.transaction() as session:
            session.execute(text("DROP TRIGGER bug"))
        eventually(lambda: look(held.job_id).lease_until > before)
        assert not keeper.lost.is_set()


def test_a_missing_parent_ends_the_process(keep, held):
    with keep(held, parent=2**22 + 1) as keeper:
        assert keeper.lost.wait(10)


@pytest.mark.databases("sqlite", "postgres")
def test_a_process_that_slept_past_its_lease_cannot_write(settings, database, held, program, diary, look, claim):
    code = f"""
    from app.shared.database import Database
    from app.shared.errors import FencedOutError
    from app.shared.repositories import outputs
    from app.shared.repositories.leases import Lease
    from app.shared.settings import load_settings
    from worker.attempt.lease import LeaseKeeper
    settings = load_settings()
    database, lease = Database(settings.database), Lease(job_id=sys.argv[1], fence=sys.argv[2])
    number = 0
    with LeaseKeeper(database, lease, settings, parent=os.getppid(), on_stop=lambda: None):
        while True:
            number += 1
            try:
                with database.transaction() as session:
                    outputs.report_progress(session, lease, stage=f"stage{{number}}", progress=0.5)
            except FencedOutError:
                {diary.note("'refused'")}
                time.sleep(60)
            time.sleep(0.01)
    """
    environment = {**os.environ, **settings.environment()}
    zombie = subprocess.Popen([sys.executable, *program(code), held.job_id, held.fence], env=environment)
    eventually(lambda: look(held.job_id).stage)

    def stops_between_transactions():
        # In the middle of a transaction, no other process could write before this one continues.
        with database.transaction() as session:
            session.execute(text("SELECT 1"))
            zombie.send_signal(signal.SIGSTOP)
            eventually(lambda: psutil.Process(zombie.pid).status() == psutil.STATUS_STOPPED)
            row = select(Job.id).where(Job.id == held.job_id).with_for_update(skip_locked=True)
            if session.execute(row).first() is not None:
                return True
        zombie.send_signal(signal.SIGCONT)
        return False

    eventually(stops_between_transactions)

    def reclaim():
        with database.transaction() as session:
            return sweeps.reclaim_expired(session)

    assert eventually(reclaim) == [held.job_id]
    heir = claim(held.job_id)
    before = look(held.job_id)
    zombie.send_signal(signal.SIGCONT)
    assert zombie.wait(20) == EXIT_FENCED_OUT
    after = look(held.job_id)
    assert set(diary.read()) <= {"refused"}
    assert (after.stage, after.fence, after.last_event) == (before.stage, heir.fence, before.last_event)
    with database.transaction() as session:
        assert leases.release_job(session, heir) == "queued"
