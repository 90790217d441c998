import ast
import itertools
from pathlib import Path

import pytest
from sqlalchemy import update

import app
from app.shared.database import now
from app.shared.lifecycle import MOVES, Status, move
from app.shared.models import Job

pytestmark = pytest.mark.databases("sqlite", "postgres")

TERMINAL = {Status.SUCCEEDED, Status.FAILED, Status.CANCELLED}
HELD = {"fence": "f" * 32, "claimed_by": "w"}


def put(session, job_id, status):
    held = HELD | {"lease_until": now(session)} if status.is_held else {}
    session.execute(update(Job).where(Job.id == job_id).values(status=status, **held))


@pytest.mark.parametrize(("source", "target"), list(itertools.product(Status, Status)))
def test_only_listed_status_transitions_are_made(database, submit, source, target):
    job_id = submit()
    with database.transaction() as session:
        put(session, job_id, source)
        at = now(session)
        held = HELD | {"lease_until": at} if target.is_held else {}
        assert move(session, job_id, target, at=at, **held) == (target in MOVES[source])
    with database.snapshot() as session:
        job = session.get(Job, job_id)
        assert job.status == (target if target in MOVES[source] else source)


def test_terminal_statuses_are_final():
    assert {status for status in Status if status.is_terminal} == TERMINAL
    assert all(not MOVES[status] for status in TERMINAL)


def test_every_status_is_reachable_from_the_first():
    reached, frontier = set(), {Status.QUEUED}
    while frontier:
        reached |= frontier
        frontier = {target for status in frontier for target in MOVES[status]} - reached
    assert reached == set(Status)


def test_leaving_running_clears_the_claim(database, submit):
    job_id = submit()
    with database.transaction() as session:
        put(session, job_id, Status.RUNNING)
        assert move(session, job_id, Status.FAILED, at=now(session))
        job = session.get(Job, job_id, populate_existing=True)
        assert (job.fence, job.claimed_by, job.lease_until) == (None, None, None)
        assert job.finished_at == now(session)


def test_a_condition_that_does_not_hold_prevents_a_transition(database, submit):
    job_id = submit()
    with database.transaction() as session:
        assert not move(session, job_id, Status.CANCELLED, Job.owner == "somebody", at=now(session))
        assert move(session, job_id, Status.CANCELLED, Job.owner == "local", at=now(session))


def test_only_lifecycle_changes_a_status():
    # Every writer of the column goes through `move`, apart from the row's creation.
    package = Path(app.__file__).parent
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                changed = [t for t in targets if isinstance(t, ast.Attribute) and t.attr == "status"]
                # Classes of errors have an HTTP status.
                assert [t for t in changed if ast.unparse(t) != "cls.status"] == [], file
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "values":
                assert "status" not in {keyword.arg for keyword in node.keywords}, file
