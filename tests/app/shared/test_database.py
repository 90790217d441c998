import os
import stat
import threading
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta, timezone

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import DatabaseError, IntegrityError

from app.shared.database import Database, now, upgrade
from app.shared.errors import DatabaseUnavailableError, DiskFullError
from app.shared.models import Job, OutboxRow

pytestmark = pytest.mark.databases("sqlite", "postgres")


@pytest.mark.databases("sqlite")  # a server is set up by its operator
@pytest.mark.parametrize(("pragma", "value"), [("journal_mode", "wal"), ("synchronous", 2), ("foreign_keys", 1)])
def test_sqlite_is_durable_and_checks_references(database, pragma, value):
    with database.snapshot() as session:
        assert session.execute(text(f"PRAGMA {pragma}")).scalar_one() == value


def test_a_failed_transaction_leaves_nothing(database, submit):
    submit()

    def crash():
        with database.transaction() as session:
            session.execute(text("DELETE FROM outbox"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crash()
    with database.snapshot() as session:
        assert len(session.scalars(select(OutboxRow)).all()) == 1


@pytest.mark.databases("sqlite")  # on Postgres rows are locked, not the database; see the repositories' own tests
def test_concurrent_writers_that_read_first_lose_no_update(database, submit):
    # Deferred transactions would fail here with "database is locked" whatever the timeout.
    job_id = submit()
    started = threading.Barrier(4)

    def increment():
        started.wait()
        for _ in range(10):
            with database.transaction() as session:
                job = session.get(Job, job_id)
                job.last_event += 1

    threads = [threading.Thread(target=increment) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.snapshot() as session:
        assert session.get(Job, job_id).last_event == 1 + 40


def test_a_reader_does_not_wait_for_a_writer(database, submit):
    job_id = submit()
    with database.transaction() as writer:
        writer.get(Job, job_id).stage = "halfway"
        writer.flush()
        with database.snapshot() as reader:
            assert reader.get(Job, job_id).stage is None


def test_an_unreachable_database_is_reported_without_password(tmp_path):
    for url in (f"sqlite:///{tmp_path}/none/x.sqlite3", "postgresql+psycopg://u:canary@127.0.0.1:1/n"):
        database = Database(url)
        with pytest.raises(DatabaseUnavailableError) as caught, database.snapshot() as session:
            session.execute(text("SELECT 1"))
        assert "canary" not in str(caught.value)
        database.close()


@pytest.mark.databases("sqlite")  # a server's disk cannot be filled from here
def test_a_full_disk_has_its_own_error(database):
    with database.transaction() as session:
        pages = session.execute(text("PRAGMA page_count")).scalar_one()
        session.execute(text(f"PRAGMA max_page_count={pages}"))
    with pytest.raises(DiskFullError), database.transaction() as session:
        session.execute(text("CREATE TABLE big AS SELECT randomblob(1000000)"))


@pytest.mark.databases("sqlite")  # Postgres waits for as long as it takes
def test_a_lock_held_too_long_has_its_own_error(database, database_url, monkeypatch):
    monkeypatch.setattr("app.shared.database._BUSY_SECONDS", 0.05)
    other = Database(database_url)
    with database.transaction() as session:
        session.execute(text("DELETE FROM outbox"))
        with pytest.raises(DatabaseUnavailableError), other.transaction() as second:
            second.execute(text("SELECT 1"))
    other.close()


def test_an_exhausted_pool_has_its_own_error(database, monkeypatch):
    monkeypatch.setattr(database.engine.pool, "_timeout", 0.05)
    monkeypatch.setattr(database.engine.pool, "_max_overflow", 0)
    with ExitStack() as readers:
        for _ in range(database.engine.pool.size()):
            readers.enter_context(database.snapshot()).execute(text("SELECT 1"))
        with pytest.raises(DatabaseUnavailableError, match="in use"), database.snapshot() as second:
            second.execute(text("SELECT 1"))


def test_a_snapshot_is_consistent(database, submit):
    job_id = submit()
    with database.snapshot() as reader:
        before = reader.get(Job, job_id).last_event
        with database.transaction() as writer:
            writer.get(Job, job_id).last_event = 99
        assert reader.get(Job, job_id, populate_existing=True).last_event == before


def test_instants_are_preserved_across_time_zones(database, submit):
    job_id = submit()
    instant = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=5)))
    with database.transaction() as session:
        session.get(Job, job_id).available_at = instant
    with database.snapshot() as session:
        read = session.get(Job, job_id).available_at
    assert read == instant
    assert read.tzinfo is UTC


def test_an_instant_without_a_time_zone_is_refused(database, submit):
    job_id = submit()
    with pytest.raises(Exception, match="time zone"), database.transaction() as session:
        session.get(Job, job_id).available_at = datetime(2026, 1, 1)


def test_time_comes_from_the_given_clock(database, clock):
    with database.transaction() as session:
        first = now(session)
        clock.advance(1.5)
        assert (now(session) - first).total_seconds() == 1.5


@pytest.mark.parametrize(
    "change",
    [
        "status = 'lost'",
        "attempt = max_attempts + 1",
        "attempt = -1",
        "progress = 1.5",
        "fence = 'f'",
        "status = 'running'",
    ],
)
def test_constraints_refuse_an_invalid_row(database, submit, change):
    submit()
    with pytest.raises(IntegrityError), database.transaction() as session:
        session.execute(text("UPDATE jobs SET " + change))  # noqa: S608


def test_a_database_is_current_once_it_is_upgraded(tmp_path):
    database = Database(f"sqlite:///{tmp_path}/x.sqlite3")
    assert not database.is_current()
    upgrade(database.url)
    assert database.is_current()
    database.close()


def test_a_database_file_is_private_to_its_owner(tmp_path):
    before = os.umask(0o022)
    try:
        upgrade(f"sqlite:///{tmp_path}/data/rocket.sqlite3")
        database = Database(f"sqlite:///{tmp_path}/data/rocket.sqlite3")
        with database.transaction() as session:
            session.execute(text("DELETE FROM outbox"))
            # Including SQLite's additional files.
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "data").iterdir()}
        database.close()
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("rocket.sqlite3", "rocket.sqlite3-shm", "rocket.sqlite3-wal"), 0o600)


def test_a_file_that_is_not_a_database_is_not_overwritten(tmp_path):
    file = tmp_path / "x.sqlite3"
    file.write_text("not a database, but somebody's notes " * 100)
    before = file.read_bytes()
    with pytest.raises(DatabaseError, match="not a database"):
        upgrade(f"sqlite:///{file}")
    assert file.read_bytes() == before
