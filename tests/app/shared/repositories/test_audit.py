from datetime import timedelta

import pytest
from sqlalchemy import delete, text, update
from sqlalchemy.exc import DBAPIError

from app.shared.database import downgrade, now, upgrade
from app.shared.models import AuditEvent
from app.shared.repositories import audit
from app.shared.repositories.audit import ADMIN, LOCAL_ACTOR, Action

pytestmark = pytest.mark.databases("sqlite", "postgres")


@pytest.fixture
def recorded(database, clock):
    """Record three events, an hour apart."""
    for actor, action in (
        (LOCAL_ACTOR, Action.JOB_SUBMIT),
        (LOCAL_ACTOR.on_behalf_of("alice"), Action.JOB_DELETE),
        (ADMIN.on_behalf_of("alice"), Action.KEY_CREATE),
    ):
        with database.transaction() as session:
            audit.record(session, actor, action, subject="x", detail={"number": 1})
        clock.advance(3600)


def found(database, **choice):
    with database.snapshot() as session:
        return [(event.tenant, event.action) for event in audit.list_events(session, **{"limit": 10} | choice)]


def test_events_are_filtered_and_listed_newest_first(database, recorded):
    everything = [("alice", "key.create"), ("alice", "job.delete"), ("local", "job.submit")]
    assert found(database) == everything
    assert found(database, limit=1) == everything[:1]
    assert found(database, tenant="local") == everything[2:]
    assert found(database, action=Action.JOB_DELETE) == everything[1:2]
    with database.snapshot() as session:
        since = now(session) - timedelta(hours=2)
    assert found(database, since=since) == everything[:2]


def test_an_operator_is_recorded_with_the_system_account(database, recorded):
    with database.snapshot() as session:
        newest, *others = audit.list_events(session, limit=10)
    assert (newest.actor, newest.detail["number"]) == ("admin", 1)
    assert isinstance(newest.detail["uid"], int)
    assert [event.detail for event in others] == [{"number": 1}] * 2


@pytest.mark.parametrize("statement", [update(AuditEvent).values(tenant="bob"), delete(AuditEvent)])
def test_the_database_refuses_to_change_or_delete_an_event(database, recorded, statement):
    with pytest.raises(DBAPIError, match="append-only"), database.transaction() as session:
        session.execute(statement)
    assert len(found(database)) == 3


@pytest.mark.databases("sqlite")
def test_the_database_refuses_to_replace_an_event(database, recorded):
    before = found(database)
    columns = "at, tenant, actor, action, outcome, detail"
    replace = f"INSERT OR REPLACE INTO audit_events (id, {columns}) SELECT id, {columns.replace('tenant', '1')}"
    with pytest.raises(DBAPIError, match="append-only"), database.transaction() as session:
        session.execute(text(f"{replace} FROM audit_events"))
    assert found(database) == before


@pytest.mark.databases("postgres")
def test_the_database_refuses_to_truncate_the_log(database, recorded):
    with pytest.raises(DBAPIError, match="append-only"), database.transaction() as session:
        session.execute(text("TRUNCATE audit_events"))
    assert len(found(database)) == 3


def test_a_failed_action_leaves_no_event(database):
    def fail(session):
        audit.record(session, LOCAL_ACTOR, Action.JOB_SUBMIT)
        raise RuntimeError

    with pytest.raises(RuntimeError), database.transaction() as session:
        fail(session)
    assert found(database) == []


def test_a_downgrade_removes_the_log_and_its_triggers(database, database_url, recorded):
    downgrade(database_url, "0004")
    upgrade(database_url)
    assert found(database) == []
