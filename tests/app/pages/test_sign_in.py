"""Signing in: who can, for how long, and what the cookie allows."""

import hashlib
import re

import pytest

from app.services import sessions
from app.shared.repositories import keys
from tests.app.api.conftest import BODY


@pytest.fixture
def key(context):
    with context.database.transaction() as session:
        return keys.create_key(session, "alice")


@pytest.fixture
def sign_in(page, key):
    def sign_in(text=None, **fields):
        return page("POST", "/ui/sign-in", data={"key": text or key.text} | fields)

    return sign_in


def csrf_of(text):
    return re.search(r'name="csrf" value="([^"]+)"', text)[1]


def test_without_keys_there_is_no_sign_in(page):
    answer = page("GET", "/")
    assert answer.status_code == 200
    assert "Sign out" not in answer.text


def test_with_keys_a_browser_is_redirected_to_sign_in_and_back(page, key, sign_in):
    answer = page("GET", "/ui/profiles?after=x")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/ui/sign-in?next=%2Fui%2Fprofiles%3Fafter%3Dx")
    assert "API key" in page("GET", answer.headers["Location"]).text
    answer = sign_in(next="/ui/profiles")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/ui/profiles")
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert key.text not in cookie
    text = page("GET", "/ui/profiles").text
    assert "alice" in text


def test_updates_of_an_ended_session_redirect_to_sign_in(page, key):
    answer = page("GET", "/ui/rows", headers={"HX-Request": "true"})
    assert answer.headers["HX-Redirect"] == "/ui/sign-in"


@pytest.mark.parametrize("text", ["rk_0123456789abcdef_" + "0" * 64, "x", " ", "é"])
def test_an_invalid_key_opens_no_session(sign_in, text):
    answer = sign_in(text)
    assert answer.status_code == 401
    assert "Set-Cookie" not in answer.headers
    assert "unknown, expired or revoked" in answer.text


@pytest.mark.parametrize("address", ["https://evil.example", "//evil.example", "/\\evil.example", "x"])
def test_signing_in_redirects_only_within_the_service(sign_in, address):
    assert sign_in(next=address).headers["Location"] == "/"


def test_forms_of_another_session_are_refused(page, client, sign_in):
    sign_in()
    job = client.post("/jobs", json=BODY, headers={"Authorization": "Bearer " + "x"})
    assert job.status_code == 401
    fields = {"model_id": "local/tiny", "ratio": "0.3"}
    assert page("POST", "/ui/new", data=fields).status_code == 403
    assert page("POST", "/ui/new", data=fields | {"csrf": "guessed"}).status_code == 403
    assert page("POST", "/ui/new", data=fields, headers={"Origin": "https://evil.example"}).status_code == 403
    token = csrf_of(page("GET", "/ui/new").text)
    assert page("POST", "/ui/new", data=fields | {"csrf": token}).status_code == 303
    assert page("POST", "/ui/new/preview", data=fields, headers={"X-CSRF-Token": token}).status_code == 200


def test_the_cookie_gives_read_only_access_to_the_api(page, client, sign_in):
    sign_in()
    assert client.get("/jobs").status_code == 200
    assert client.post("/jobs", json=BODY).status_code == 401
    assert client.request("DELETE", "/jobs/job_" + "0" * 26).status_code == 401


def test_a_session_ends_with_its_key_its_time_or_a_sign_out(page, client, context, key, sign_in, monkeypatch):
    sign_in()
    token = csrf_of(page("GET", "/").text)
    answer = page("POST", "/ui/sign-out", data={"csrf": token})
    assert answer.headers["Location"] == "/ui/sign-in"
    assert page("GET", "/").status_code == 303
    sign_in()
    with monkeypatch.context() as patch:
        later = sessions.time.time() + sessions.SESSION_SECONDS + 1
        patch.setattr(sessions.time, "time", lambda: later)
        assert page("GET", "/").status_code == 303
    # The client has dropped the cookie by its own clock.
    sign_in()
    assert page("GET", "/").status_code == 200
    with context.database.transaction() as session:
        keys.revoke_key(session, key.row.id)
    assert page("GET", "/").status_code == 303


def test_signing_out_ends_every_copy_of_the_cookie(page, client, context, sign_in):
    sign_in()
    copied = client.cookies["rocket_session"]
    token = csrf_of(page("GET", "/").text)
    client.cookies.clear()
    sign_in()
    other = client.cookies["rocket_session"]
    client.cookies.set("rocket_session", copied, domain="localhost.local")
    assert page("POST", "/ui/sign-out", data={"csrf": token}).status_code == 303
    for cookie, status in ((copied, 303), (other, 200)):
        client.cookies.clear()
        client.cookies.set("rocket_session", cookie)
        assert page("GET", "/").status_code == status
        assert client.get("/jobs").status_code == (401 if status == 303 else 200)


def test_the_database_stores_no_session_token(page, client, context, sign_in):
    sign_in()
    token = client.cookies["rocket_session"]
    with context.database.snapshot() as session:
        [(row, _)] = sessions.sessions.list_sessions(session)
    assert token.split("_")[1] == row.id
    assert row.secret_sha256 == hashlib.sha256(token.split("_")[2].encode()).hexdigest()
    assert csrf_of(page("GET", "/").text) not in token
    for forged in (f"rs_{row.id}_{row.secret_sha256}", token[:-1] + ("0" if token[-1] != "0" else "1"), token + "0"):
        client.cookies.clear()
        client.cookies.set("rocket_session", forged)
        assert page("GET", "/").status_code == 303


def test_an_invalid_cookie_counts_as_no_cookie(page, client, key):
    for value in ("x", "gAAAAA", "a" * 5000):
        client.cookies.set("rocket_session", value)
        assert page("GET", "/").status_code == 303


def test_a_read_only_key_cannot_create_jobs(page, context, sign_in):
    with context.database.transaction() as session:
        reader = keys.create_key(session, "alice", scopes=["read"])
    sign_in(reader.text)
    token = csrf_of(page("GET", "/ui/new").text)
    answer = page("POST", "/ui/new", data={"model_id": "local/tiny", "ratio": "0.3", "csrf": token})
    assert answer.status_code == 403
    assert "lacks the scope" in answer.text


def test_jobs_of_other_tenants_are_not_found(page, client, context, sign_in):
    with context.database.transaction() as session:
        bob = keys.create_key(session, "bob")
    mine = client.post("/jobs", json=BODY, headers={"Authorization": f"Bearer {bob.text}"}).json()["id"]
    sign_in()
    for path in ("", "/live", "/log", "/figures/allocation-map.json"):
        assert page("GET", f"/ui/jobs/{mine}{path}").status_code == 404, path
    assert mine not in page("GET", "/").text
    assert page("GET", f"/ui/compare?job={mine}").status_code == 404


def test_failed_sign_ins_are_rate_limited(sign_in):
    statuses = [sign_in("rk_x").status_code for _ in range(35)]
    assert statuses[:20] == [401] * 20
    assert statuses[-1] == 429
