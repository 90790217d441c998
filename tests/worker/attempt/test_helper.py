"""Helpers that cannot help; those that do are in tests/e2e/test_helping.py."""

import shutil
import threading

import pytest

from app.shared.repositories import events
from worker.attempt.helper import Helper
from worker.processes.children import start_program
from worker.processes.isolation import Isolation


@pytest.fixture
def offer(work, look):
    """Make it look as if the attempt at a job offered blocks; return the folder of its files."""

    def offer(job_id):
        folder = work / look(job_id).work_key
        (folder / "out" / ".rocket-work").mkdir(parents=True)
        (folder / "out" / ".rocket-work" / "offer.json").write_text("{}")
        return folder

    return offer


@pytest.fixture
def helper(settings, database):
    def helper(lease, stop=None):
        names = {"name": "a" * 32, "worker": "idle:1"}
        stop = stop or threading.Event()
        return Helper(settings, database, lease, stop, "cpu", **names, isolation=Isolation(), launch=start_program)

    return helper


def told(database, job_id):
    with database.snapshot() as session:
        return [(event.level, event.message) for event in events.list_events(session, job_id)]


def test_a_helper_says_why_it_cannot_help(helper, submit, claim, model, offer, database, look):
    job_id = submit()
    lease = claim(job_id)
    folder = offer(job_id)
    shutil.rmtree(model)

    helper(lease).run()

    level, message = told(database, job_id)[-1]
    assert (level, message.partition(":")[0]) == ("warning", "idle")
    assert message.startswith("idle:1 does not help: ")
    assert str(folder.parents[1]) not in message
    assert (look(job_id).status, look(job_id).fence) == ("running", lease.fence)
    assert not list(folder.glob("help-*"))


def test_a_helper_reads_damaged_offers_as_such(helper, submit, claim, model, offer, database, look):
    job_id = submit()
    lease = claim(job_id)
    folder = offer(job_id)

    helper(lease).run()

    (_, first), (level, second) = told(database, job_id)[-2:]
    assert first == "idle:1 helps with blocks of the model"
    assert level == "warning"
    assert "offer.json is damaged" in second
    assert not list(folder.glob("help-*"))


def test_a_helper_without_an_offer_waits_until_it_is_stopped(helper, submit, claim, model, database):
    job_id = submit()
    stop = threading.Event()
    stop.set()
    before = told(database, job_id)
    lease = claim(job_id)
    helper(lease, stop).run()
    assert len(told(database, job_id)) == len(before) + 1
