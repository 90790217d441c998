"""The page of a tenant's API keys."""

import re
from datetime import timedelta
from http import HTTPStatus

import pytest

from app.services import api_keys
from app.services.access import Caller
from app.shared.errors import PermissionDeniedError
from app.shared.models import ApiKey, AuditEvent
from app.shared.repositories import keys
from app.shared.repositories.audit import Actor
from tests.app.pages.test_sign_in import csrf_of


@pytest.fixture
def allow(context, settings):
    object.__setattr__(context, "settings", settings.model_copy(update={"tenants_manage_keys": True}))


@pytest.fixture
def key(context):
    def key(tenant, *scopes):
        with context.database.transaction() as session:
            return keys.create_key(session, tenant, scopes=scopes or ("read", "write"))

    return key


@pytest.fixture
def sign_in(page):
    """Sign in, and return a function that sends a form."""

    def sign_in(key):
        page("POST", "/ui/sign-in", data={"key": key.text})
        token = csrf_of(page("GET", "/ui/keys").text)
        return lambda address="/ui/keys", **fields: page("POST", address, data={"csrf": token, **fields})

    return sign_in


def test_a_key_is_created_shown_once_and_works(page, client, key, sign_in, allow):
    send = sign_in(key("alice"))
    answer = send(label="<ci>", days="3", **{"scope-read": "yes"})
    made = re.search(r"rk_[0-9a-f]{16}_[0-9a-f]{64}", answer.text)[0]
    assert answer.headers["Cache-Control"] == "no-store"
    later = page("GET", "/ui/keys").text
    assert made not in later
    assert made[:19] in later
    assert "&lt;ci&gt;" in later
    client.cookies.clear()
    bearer = {"Authorization": f"Bearer {made}"}
    assert client.get("/jobs", headers=bearer).status_code == HTTPStatus.OK
    assert client.post("/webhooks", json={"url": "https://example.org"}, headers=bearer).status_code == 403


def test_cells_of_keys_do_not_break_within_a_value(page, key, sign_in, allow):
    send = sign_in(key("alice"))
    send(label="", days="3", **{"scope-read": "yes"})
    shown = page("GET", "/ui/keys").text
    assert '<span class="whole">read, write</span>' in shown
    assert re.search(r'<span class="whole">until \d{4}-\d\d-\d\d</span>', shown)
    assert len(re.findall(r'<code class="whole">rk_', shown)) == 2
    # On a phone, a key without a label has no row for it.
    assert len(re.findall(r'<td data-title="label" data-empty>', shown)) == 1


def test_a_revoked_key_is_refused_at_once(client, key, sign_in, allow, context):
    mine, other = key("alice"), key("alice")
    send = sign_in(mine)
    assert send(f"/ui/keys/{other.row.id}/revoke").status_code == 303
    with context.database.snapshot() as session:
        assert [row.action for row in session.query(AuditEvent)][-1] == "key.revoke"
    assert client.get("/jobs", headers={"Authorization": f"Bearer {other.text}"}).status_code == 401
    # One's own key as well, with the session.
    send(f"/ui/keys/{mine.row.id}/revoke")
    assert client.get("/jobs").status_code == 401


def test_keys_of_other_tenants_are_neither_shown_nor_revoked(page, client, key, sign_in, allow):
    theirs = key("bob")
    send = sign_in(key("alice"))
    assert theirs.row.id not in page("GET", "/ui/keys").text
    for key_id in (theirs.row.id, "0" * 16, "x"):
        assert send(f"/ui/keys/{key_id}/revoke").status_code == 404
    assert client.get("/jobs", headers={"Authorization": f"Bearer {theirs.text}"}).status_code == 200


def test_a_key_gets_no_more_than_its_creators_scopes(client, key, sign_in, allow):
    send = sign_in(key("alice"))
    assert send(**{"scope-read": "yes", "scope-metrics": "yes"}).status_code == 403
    client.cookies.clear()
    send = sign_in(key("alice", "read"))
    assert send(**{"scope-read": "yes"}).status_code == 403


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"scope-read": "yes", "days": "0"},
        {"scope-read": "yes", "days": "x"},
        {"scope-read": "yes", "label": "a" * 65},
    ],
)
def test_other_keys_are_refused_with_a_reason(key, sign_in, allow, fields):
    answer = sign_in(key("alice"))(**fields)
    assert answer.status_code == 422
    assert 'role="alert"' in answer.text


def test_without_the_operators_leave_keys_are_only_shown(page, client, key, sign_in):
    mine = key("alice")
    send = sign_in(mine)
    text = page("GET", "/ui/keys").text
    assert "ROCKET_TENANTS_MANAGE_KEYS" in text
    assert "Revoke" not in text
    assert send(**{"scope-read": "yes"}).status_code == 403
    assert send(f"/ui/keys/{mine.row.id}/revoke").status_code == 403


def test_a_key_does_not_outlive_its_creator(key, sign_in, allow, context):
    mine = key("alice")
    with context.database.transaction() as session:
        session.get_one(ApiKey, mine.row.id).expires_at = mine.row.created_at + timedelta(days=9)
    send = sign_in(mine)
    for days, status in (("", 422), ("9", 422), ("8", 200)):
        assert send(**{"scope-read": "yes", "days": days}).status_code == status


def test_forms_need_the_token_of_the_session(page, key, sign_in, allow):
    sign_in(key("alice"))
    assert page("POST", "/ui/keys", data={"scope-read": "yes", "csrf": "guessed"}).status_code == 403


def test_a_key_without_a_session_manages_no_keys(page, key, allow):
    mine, other = key("alice"), key("alice")
    bearer = {"Authorization": f"Bearer {mine.text}"}
    assert page("POST", "/ui/keys", headers=bearer, data={"scope-read": "yes"}).status_code == 403
    assert page("POST", f"/ui/keys/{other.row.id}/revoke", headers=bearer).status_code == 403
    assert "New key" not in page("GET", "/ui/keys", headers=bearer).text


def test_a_key_made_with_another_ends_with_it(client, key, sign_in, allow, page):
    stolen, own = key("alice"), key("alice")
    answer = sign_in(stolen)(**{"scope-read": "yes", "scope-write": "yes"})
    kept = re.search(r"rk_[0-9a-f]{16}_[0-9a-f]{64}", answer.text)[0]
    client.cookies.clear()
    send = sign_in(own)
    assert "The keys made with it end as well." in page("GET", "/ui/keys").text
    send(f"/ui/keys/{stolen.row.id}/revoke")
    client.cookies.clear()
    assert client.get("/jobs", headers={"Authorization": f"Bearer {kept}"}).status_code == 401
    assert client.get("/jobs", headers={"Authorization": f"Bearer {own.text}"}).status_code == 200


def test_a_key_revoked_meanwhile_makes_none(context, key, allow):
    mine = key("alice")
    caller = Caller(tenant="alice", scopes=frozenset({"read", "write"}), key_id=mine.row.id, session_id="s")
    actor = Actor(tenant="alice", name=mine.row.id, address=None, request_id=None)
    with context.database.transaction() as session:
        keys.revoke_key(session, mine.row.id)
    with pytest.raises(PermissionDeniedError, match="revoked"):
        api_keys.create_key(context, caller, actor, label="", scopes=["read"], days=None)


def test_without_keys_the_page_says_how_the_first_is_made(page):
    assert "rocket admin keys create" in page("GET", "/ui/keys").text
    assert page("POST", "/ui/keys", data={"scope-read": "yes"}).status_code == 403
