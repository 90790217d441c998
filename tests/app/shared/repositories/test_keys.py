import hashlib
from datetime import timedelta

import pytest
from sqlalchemy import select

from app.shared.errors import InvalidRequestError, NotFoundError
from app.shared.models import ApiKey, Tenant
from app.shared.repositories import keys


@pytest.fixture
def do(database):
    def do(function, *arguments, **options):
        with database.transaction() as session:
            return function(session, *arguments, **options)

    return do


def test_a_key_has_256_random_bits_and_only_its_hash_is_stored(do, database, tmp_path):
    made = [do(keys.create_key, "alice") for _ in range(20)]
    secrets = [key.text.split("_")[2] for key in made]
    assert all(len(bytes.fromhex(secret)) == 32 for secret in secrets)
    assert len({key.row.id for key in made} | set(secrets)) == 40
    for key, secret in zip(made, secrets, strict=True):
        assert key.text == f"rk_{key.row.id}_{secret}"
        assert key.row.secret_sha256 == hashlib.sha256(secret.encode()).hexdigest()
    database.close()
    stored = b"".join(file.read_bytes() for file in tmp_path.iterdir() if file.name.startswith("rocket.sqlite3"))
    assert made[0].row.secret_sha256.encode() in stored
    assert not [secret for secret in secrets if secret.encode() in stored]


def test_a_tenant_is_created_with_its_first_key(do):
    assert do(keys.create_key, "alice").is_new_tenant
    assert not do(keys.create_key, "alice").is_new_tenant
    assert do(lambda session: session.scalars(select(Tenant.name)).all()) == ["alice"]


def test_a_key_is_found_until_it_expires_or_is_revoked(do, clock):
    assert not do(keys.has_keys)
    lasting = do(keys.create_key, "alice")
    brief = do(keys.create_key, "alice", lifetime=timedelta(days=1))
    assert do(keys.find_key, brief.text).id == brief.row.id
    clock.advance(86400)
    assert do(keys.find_key, brief.text) is None
    assert do(keys.has_usable_keys)
    do(keys.revoke_key, lasting.row.id)
    assert do(keys.find_key, lasting.text) is None
    assert not do(keys.has_usable_keys)
    assert do(keys.has_keys)


def test_revoking_twice_changes_nothing(do, clock):
    key = do(keys.create_key, "alice")
    first = do(keys.revoke_key, key.row.id).revoked_at
    clock.advance(5)
    assert do(keys.revoke_key, key.row.id).revoked_at == first
    with pytest.raises(NotFoundError):
        do(keys.revoke_key, "0" * 16)


@pytest.mark.databases("sqlite", "postgres")
def test_keys_made_with_a_key_end_with_it(do):
    first = do(keys.create_key, "alice")
    made = do(keys.create_key, "alice", made_with=first.row.id)
    next_ = do(keys.create_key, "alice", made_with=made.row.id)
    other = do(keys.create_key, "alice")
    do(keys.revoke_key, made.row.id)
    assert [do(keys.find_key, key.text) is not None for key in (first, made, next_, other)] == [
        True,
        False,
        False,
        True,
    ]
    do(keys.revoke_key, first.row.id)
    assert [do(keys.find_key, key.text) is not None for key in (first, other)] == [False, True]


def test_keys_are_listed_by_tenant(do):
    first, _, second = (do(keys.create_key, name) for name in ("alice", "bob", "alice"))
    assert {row.id for row in do(keys.list_keys, "alice")} == {first.row.id, second.row.id}
    assert len(do(keys.list_keys)) == 3


@pytest.mark.parametrize("name", ["", "A", "a b", "../a", "-a", "a" * 65, "a\n", "ä", "a/b", "a\x00"])
def test_an_invalid_name_creates_no_tenant(do, name):
    with pytest.raises(InvalidRequestError) as refused:
        do(keys.create_key, name)
    assert not name or name not in str(refused.value) or len(name) == 1
    assert do(keys.list_keys) == []


@pytest.mark.parametrize(
    "options",
    [{"scopes": []}, {"scopes": ["read", "admin"]}, {"label": "x" * 65}, {"label": "a\nb"}, {"label": "\x00"}],
)
def test_invalid_key_options_are_refused(do, options):
    with pytest.raises(InvalidRequestError):
        do(keys.create_key, "alice", **options)


def test_scopes_are_stored_sorted_and_unique(do):
    assert do(keys.create_key, "alice", scopes=["metrics", "read", "read"]).row.scopes == "read metrics"


def test_a_use_is_recorded_once_a_minute(do, clock):
    key = do(keys.create_key, "alice")
    other = do(keys.create_key, "alice")
    do(keys.note_use, key.row.id)
    first = do(lambda session: session.get_one(ApiKey, key.row.id).last_used_at)
    clock.advance(30)
    do(keys.note_use, key.row.id)
    rows = {row.id: row.last_used_at for row in do(keys.list_keys)}
    assert rows == {key.row.id: first, other.row.id: None}
