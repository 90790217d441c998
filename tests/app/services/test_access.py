from datetime import timedelta

import pytest

from app.services.access import LOCAL_CALLER, authenticate, check_safe_binding, is_loopback
from app.shared.database import Database
from app.shared.errors import DiskFullError, InvalidSettingsError, UnauthenticatedError
from app.shared.models import ApiKey
from app.shared.repositories import keys
from app.shared.settings import Settings

EVERYWHERE = "0.0.0.0"  # noqa: S104  # said, and never bound


@pytest.fixture
def make_key(database):
    def make_key(tenant="alice", **options):
        with database.transaction() as session:
            return keys.create_key(session, tenant, **options)

    return make_key


@pytest.fixture
def last_use(database):
    def last_use(key):
        with database.snapshot() as session:
            return session.get_one(ApiKey, key.row.id).last_used_at

    return last_use


def bearer(key):
    return f"Bearer {key.text}"


def test_without_keys_loopback_requests_belong_to_local(database):
    assert authenticate(database, None, is_local=True) == LOCAL_CALLER
    assert LOCAL_CALLER.tenant == "local"


def test_after_the_first_key_the_loopback_needs_one_too(database, make_key):
    key = make_key()
    with pytest.raises(UnauthenticatedError):
        authenticate(database, None, is_local=True)
    caller = authenticate(database, bearer(key), is_local=True)
    assert (caller.tenant, caller.key_id, caller.scopes) == ("alice", key.row.id, {"read", "write"})


def test_an_expired_key_does_not_reopen_the_loopback(database, make_key, clock):
    key = make_key(lifetime=timedelta(hours=1))
    clock.advance(3601)
    for is_local in (True, False):
        for sent in (bearer(key), None):
            with pytest.raises(UnauthenticatedError):
                authenticate(database, sent, is_local=is_local)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
def test_the_authentication_scheme_is_case_insensitive(database, make_key, scheme):
    key = make_key()
    assert authenticate(database, f"{scheme} {key.text}", is_local=False).tenant == "alice"


@pytest.mark.parametrize(
    "forge",
    [
        lambda key, other: key.text[:-1] + ("0" if key.text[-1] != "0" else "1"),
        lambda key, other: f"rk_{other.row.id}_{key.text.rsplit('_', 1)[1]}",
        lambda key, other: f"rk_{'0' * 16}_{key.text.rsplit('_', 1)[1]}",
        lambda key, other: f"rk_{key.row.id}_{key.row.secret_sha256}",
        lambda key, other: key.text.upper(),
        lambda key, other: key.text + "0",
        lambda key, other: f"rk_{key.row.id}_",
        lambda key, other: f"rk_{key.row.id}_%",
        lambda key, other: "\x00" + key.text,
        lambda key, other: key.text + "\ud800",
        lambda key, other: "",
    ],
)
def test_forged_keys_are_refused(database, make_key, forge):
    key, other = make_key("alice"), make_key("bob")
    with pytest.raises(UnauthenticatedError):
        authenticate(database, f"Bearer {forge(key, other)}", is_local=False)


@pytest.mark.parametrize("form", ["{}", "Basic {}", "Token {}", "Bearer", "Bearer{}", "Bearer {} {}"])
def test_a_key_must_be_sent_as_bearer(database, make_key, form):
    key = make_key()
    with pytest.raises(UnauthenticatedError):
        authenticate(database, form.format(key.text, key.text), is_local=True)


def test_the_last_use_is_recorded_at_most_once_a_minute(database, make_key, clock, last_use):
    key = make_key()
    assert last_use(key) is None
    authenticate(database, bearer(key), is_local=False)
    first = last_use(key)
    clock.advance(59)
    authenticate(database, bearer(key), is_local=False)
    assert last_use(key) == first
    clock.advance(1)
    authenticate(database, bearer(key), is_local=False)
    assert last_use(key) == first + timedelta(minutes=1)


def test_a_key_works_if_its_use_cannot_be_recorded(database, make_key, monkeypatch):
    key = make_key()

    def full(_self):
        raise DiskFullError("the database has no room left")

    monkeypatch.setattr(Database, "transaction", full)
    assert authenticate(database, bearer(key), is_local=False).tenant == "alice"


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.8.9.1", "localhost", "::1", "::ffff:127.0.0.1", "127.1", "0:0:0:0:0:0:0:1"],
)
def test_local_addresses_are_loopback(address):
    assert is_loopback(address)


@pytest.mark.parametrize(
    "address",
    [
        EVERYWHERE,
        "0",
        "::",
        "",
        "::ffff:0.0.0.0",
        "::ffff:192.168.1.5",
        "192.168.1.5",
        "10.0.0.1",
        "fe80::1",
        "169.254.1.1",
        "name.invalid",
        "127.0.0.1.example.invalid",
        "\ud800",
        "a" * 300,
    ],
)
def test_reachable_addresses_are_not_loopback(address):
    assert not is_loopback(address)


def test_a_name_with_one_external_address_is_not_loopback(monkeypatch):
    found = [(2, 1, 6, "", ("127.0.0.1", 0)), (2, 1, 6, "", ("192.168.1.5", 0))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_arguments, **_options: found)
    assert not is_loopback("both.example")


def test_without_keys_binding_beyond_the_loopback_is_refused(database, database_url, make_key):
    settings = Settings(database_url=database_url)
    check_safe_binding(settings, "127.0.0.1")
    for address in (EVERYWHERE, "::", ""):
        with pytest.raises(InvalidSettingsError, match="`rocket admin keys create TENANT`"):
            check_safe_binding(settings, address)
    make_key(lifetime=timedelta(days=100 * 365))
    check_safe_binding(settings, EVERYWHERE)
    with database.transaction() as session:
        [key] = keys.list_keys(session)
        keys.revoke_key(session, key.id)
    with pytest.raises(InvalidSettingsError):
        check_safe_binding(settings, EVERYWHERE)


def test_the_suggested_command_names_the_data_folder(settings):
    with pytest.raises(InvalidSettingsError) as refused:
        check_safe_binding(settings, EVERYWHERE)
    assert f"`rocket admin keys create TENANT --data-dir {settings.data_dir}`" in str(refused.value)
