import sqlite3
import threading
import time

import pytest
from sqlalchemy import event

from app.shared.database import Database
from app.shared.errors import DatabaseUnavailableError, FencedOutError
from app.shared.repositories import events, outputs, sweeps
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.pipeline import Progress
from tests.worker.waiting import eventually
from worker.attempt.writer import ProgressWriter

DENSE = Candidate(kind="dense", kept_parameters=64, stored_bytes=256, reconstruction_error=0, weight_error=0)
PROFILE = LayerProfile(name="a", d_in=8, d_out=8, input_group="a", tokens=100, candidates=(DENSE,))


def at(stage, fraction, *, layer=None, seconds_left=None):
    return Progress(stage=stage, layer=layer, fraction=fraction, seconds_left=seconds_left)


@pytest.fixture
def held(submit, claim):
    return claim(submit())


@pytest.fixture
def hasty_database(settings):
    """Return a database that waits for another writer only briefly."""
    database = Database(settings.database)
    event.listen(database.engine, "connect", lambda connection, _: connection.execute("PRAGMA busy_timeout=20"))
    yield database
    database.close()


@pytest.fixture
def writer(hasty_database, held):
    return ProgressWriter(hasty_database, held, patience=20, max_profiles=1)


@pytest.fixture
def other_writer(settings):
    """Yield another writer in the middle of a transaction."""
    connection = sqlite3.connect(settings.database.database, isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN IMMEDIATE")
    yield connection
    if connection.in_transaction:
        connection.execute("ROLLBACK")
    connection.close()


@pytest.fixture
def stages(database, held):
    def stages():
        with database.snapshot() as session:
            return [row.message for row in events.list_events(session, held.job_id) if row.type == "stage"]

    return stages


def test_progress_within_a_stage_is_written_once_a_second(writer, held, look):
    writer.on_progress(at("calibrating", 0.1))
    for step in range(100):
        writer.on_progress(at("calibrating", 0.2 + step / 1000, layer=f"l{step}"))
    assert look(held.job_id).progress == 0.1
    assert writer.location() == ("calibrating", "l99")
    began = time.monotonic()
    written = lambda: writer.on_progress(at("calibrating", 0.5)) or look(held.job_id).progress == 0.5  # noqa: E731
    eventually(written)
    assert 0.5 < time.monotonic() - began < 5


def test_a_new_stage_is_written_at_once(writer, held, look, stages):
    for stage in ("preflight", "calibrating", "allocating"):
        writer.on_progress(at(stage, 0.5))
        assert look(held.job_id).stage == stage
    assert stages() == ["preflight", "calibrating", "allocating"]


def test_the_time_left_becomes_an_estimated_finish_time(writer, held, look):
    writer.on_progress(at("calibrating", 0.5, seconds_left=1000.0))
    job = look(held.job_id)
    assert 900 < (job.estimated_finish_at - job.started_at).total_seconds() < 1100


def test_before_the_first_step_there_is_no_place(writer):
    assert writer.location() == (None, None)


def test_a_database_outage_drops_progress_but_not_stages(writer, held, look, stages, other_writer):
    writer.on_progress(at("calibrating", 0.1))
    assert look(held.job_id).stage is None
    other_writer.execute("ROLLBACK")
    eventually(lambda: writer.on_progress(at("calibrating", 0.2)) or look(held.job_id).progress == 0.2)
    assert stages() == ["calibrating"]


def test_layers_and_allocation_wait_for_the_database(writer, database, held, other_writer):
    ended = threading.Event()

    def work():
        writer.write(outputs.save_layer_profile, 0, PROFILE)
        writer.write(outputs.save_allocation, [("a", DENSE)])
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not ended.wait(0.3)
    other_writer.execute("ROLLBACK")
    assert ended.wait(20)
    thread.join()
    with database.snapshot() as session:
        assert outputs.list_layer_profiles(session, held.job_id) == [PROFILE]
        assert outputs.list_allocation(session, held.job_id) == [("a", DENSE)]


def test_waiting_for_the_database_has_a_limit(hasty_database, held, other_writer):
    writer = ProgressWriter(hasty_database, held, patience=0, max_profiles=1)
    with pytest.raises(DatabaseUnavailableError):
        writer.write(outputs.save_layer_profile, 0, PROFILE)


def test_a_writer_that_lost_its_job_is_fenced_out(writer, database):
    with database.transaction() as session:
        sweeps.reclaim_claimed(session)
    for word in (
        lambda: writer.on_progress(at("calibrating", 0.1)),
        lambda: writer.write(outputs.save_layer_profile, 0, PROFILE),
        lambda: writer.write(outputs.save_allocation, [("a", DENSE)]),
    ):
        with pytest.raises(FencedOutError):
            word()
