from datetime import timedelta

import pytest

from app.shared.errors import NotFoundError
from app.shared.repositories import keys, sessions

HOUR = timedelta(hours=1)

pytestmark = pytest.mark.databases("sqlite", "postgres")


@pytest.fixture
def do(database):
    def do(function, *arguments, **options):
        with database.transaction() as session:
            return function(session, *arguments, **options)

    return do


@pytest.fixture
def key(do):
    return do(keys.create_key, "alice", lifetime=2 * HOUR).row.id


def listed(do, tenant=None):
    return [row.id for row, _ in do(sessions.list_sessions, tenant)]


def test_a_session_lasts_until_it_expires_or_is_revoked(do, key, clock):
    first, second = (do(sessions.open_session, key, lifetime=HOUR) for _ in range(2))
    row, found = do(sessions.find_session, first.token)
    assert (row.id, found.id, found.tenant) == (first.row.id, key, "alice")
    assert do(sessions.end_session, first.row.id)
    assert not do(sessions.end_session, first.row.id)
    assert do(sessions.find_session, first.token) is None
    assert do(sessions.find_session, second.token) is not None
    clock.advance(3600)
    assert do(sessions.find_session, second.token) is None


def test_a_session_ends_with_its_key(do, key, clock):
    made = do(sessions.open_session, key, lifetime=10 * HOUR)
    clock.advance(2 * 3600)
    assert do(sessions.find_session, made.token) is None
    other = do(keys.create_key, "bob").row.id
    theirs = do(sessions.open_session, other, lifetime=HOUR)
    do(keys.revoke_key, other)
    assert do(sessions.find_session, theirs.token) is None


def test_only_ended_sessions_are_swept(do, key, clock):
    bob = do(keys.create_key, "bob").row.id
    short = do(sessions.open_session, bob, lifetime=HOUR).row.id
    long, of_alice = (do(sessions.open_session, which, lifetime=10 * HOUR).row.id for which in (bob, key))
    do(sessions.forget_sessions)
    assert set(listed(do)) == {short, long, of_alice}
    assert listed(do, "alice") == [of_alice]
    clock.advance(3600)
    do(sessions.forget_sessions)
    assert set(listed(do)) == {long, of_alice}
    clock.advance(3600)
    do(sessions.forget_sessions)
    assert listed(do) == [long]
    do(keys.revoke_key, bob)
    do(sessions.forget_sessions)
    assert listed(do) == []


def test_a_key_has_at_most_a_hundred_sessions(do, key, clock):
    made = []
    for _ in range(103):
        made.append(do(sessions.open_session, key, lifetime=HOUR).row.id)
        clock.advance(1)
    assert listed(do) == made[3:]


def test_only_an_existing_session_can_be_revoked(do, key):
    made = do(sessions.open_session, key, lifetime=HOUR)
    assert do(sessions.revoke_session, made.row.id).id == key
    with pytest.raises(NotFoundError):
        do(sessions.revoke_session, made.row.id)
