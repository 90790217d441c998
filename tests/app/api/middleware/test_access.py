"""Access control; each test fails if its guard in `app.api.middleware.access` or `app.services.access` is removed."""

import pytest
from fastapi.routing import iter_route_contexts
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from app.api.paths import PUBLIC_PATHS, is_public, is_shared
from app.main import create_app
from app.shared.errors import DatabaseUnavailableError
from app.shared.repositories import keys
from tests.app.api.conftest import BODY
from tests.app.conftest import local_client

EVERYWHERE = "0.0.0.0"  # noqa: S104  # said, and never bound
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")
UNKNOWN = ("/", "/nowhere", "/metrics", "/metrics/x", "/docs", "/redoc", "/Jobs", "//jobs", "/jobs/", "/healthz/")


@pytest.fixture
def make_key(context):
    def make_key(tenant="alice", **options):
        with context.database.transaction() as session:
            return keys.create_key(session, tenant, **options)

    return make_key


@pytest.fixture
def revoke(context):
    def revoke(key):
        with context.database.transaction() as session:
            keys.revoke_key(session, key.row.id)

    return revoke


@pytest.fixture
def public_app(settings):
    return create_app(settings, address=EVERYWHERE)


def bearer(key):
    return {"Authorization": f"Bearer {key.text}"}


def paths(app):
    found = {route.path.replace("{job_id}", "job_" + "0" * 26) for route in iter_route_contexts(app.routes)}
    assert {"/jobs", "/healthz", "/openapi.json"} <= found
    return sorted(found)


def test_public_paths_are_listed():
    assert frozenset({"/healthz", "/readyz", "/openapi.json", "/ui/sign-in"}) == PUBLIC_PATHS


@pytest.mark.parametrize("is_bound_beyond", [False, True])
def test_every_route_requires_a_key_for_every_method(settings, make_key, is_bound_beyond):
    app = create_app(settings, address=EVERYWHERE if is_bound_beyond else "127.0.0.1")
    if not is_bound_beyond:
        make_key()
    with local_client(app) as client:
        for path in (*paths(app), *UNKNOWN):
            for method in METHODS:
                answer = client.request(method, path, json=BODY, follow_redirects=False)
                if path in PUBLIC_PATHS and method in {"GET", "HEAD"}:
                    assert answer.status_code in {200, 405}, (method, path)
                    continue
                if is_shared(path) and is_public(method, path):
                    # The token is the key, and this one is wrong.
                    assert answer.status_code in {404, 405}, (method, path)
                    continue
                if is_public(method, path):
                    # To sign in, which takes a form.
                    assert answer.status_code == 415
                    continue
                assert answer.status_code == 401, (method, path)
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                assert answer.headers["Content-Type"] == "application/problem+json"
                if method != "HEAD":
                    assert answer.json()["code"] == "unauthenticated"
                    assert answer.headers["X-Request-Id"] == answer.json()["request_id"]


def test_without_a_key_unknown_paths_look_like_existing_ones(client, make_key):
    make_key()
    answers = [client.get(path) for path in ("/jobs", "/nowhere", "/metrics", "/jobs/job_" + "0" * 26)]
    assert len({answer.json()["detail"] for answer in answers}) == 1


def test_a_key_gives_access_to_its_tenants_jobs_only(client, make_key, submitted):
    alice = bearer(make_key("alice"))
    assert client.get("/jobs", headers=alice).json()["data"] == []
    assert client.get(f"/jobs/{submitted}", headers=alice).status_code == 404
    mine = client.post("/jobs", json=BODY, headers=alice)
    assert mine.status_code == 202
    assert [job["id"] for job in client.get("/jobs", headers=alice).json()["data"]] == [mine.json()["id"]]
    local = bearer(make_key("local"))
    assert [job["id"] for job in client.get("/jobs", headers=local).json()["data"]] == [submitted]


def test_loopback_is_open_only_until_the_first_key_is_created(client, make_key, revoke):
    assert client.get("/jobs").status_code == 200
    key = make_key()
    assert client.get("/jobs").status_code == 401
    assert client.get("/jobs", headers=bearer(key)).status_code == 200
    revoke(key)
    assert client.get("/jobs", headers=bearer(key)).status_code == 401
    assert client.get("/jobs").status_code == 401


def test_other_addresses_always_need_a_key(public_app, make_key, revoke):
    with local_client(public_app) as client:
        assert client.get("/jobs").status_code == 401
        key = make_key()
        assert client.get("/jobs", headers=bearer(key)).status_code == 200
        revoke(key)
        assert client.get("/jobs").status_code == 401
        assert client.get("/jobs", headers=bearer(key)).status_code == 401


@pytest.mark.parametrize("address", ["192.168.1.5", "::ffff:192.168.1.5", "testclient", ""])
def test_remote_clients_need_a_key_whatever_address_is_bound(app, address):
    # As reported by a proxy on this machine for its client.
    with TestClient(app, base_url="http://localhost", client=(address, 1)) as client:
        assert client.get("/jobs").status_code == 401
        assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"])
def test_every_loopback_address_is_local(app, address):
    with TestClient(app, base_url="http://localhost", client=(address, 1)) as client:
        assert client.get("/jobs").status_code == 200


def test_web_sockets_are_refused_even_if_a_route_is_added(app):
    async def greet(socket):
        await socket.accept()

    app.router.add_websocket_route("/greet", greet)
    for path in ("/jobs", "/greet"):
        with local_client(app) as client, pytest.raises(WebSocketDisconnect), client.websocket_connect(path):
            pass


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "127.5.5.5", "[::1]:8000", "[::ffff:127.0.0.1]"],
)
def test_hosts_of_the_loopback_are_accepted(client, host):
    assert client.get("/jobs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "testserver",
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.example:8000",
        "localhost@evil.example",
        "localhost, evil.example",
        "192.168.1.5",
        "[::2]",
        "localhost:x",
        "[localhost]",
        "",
        "\xe4",
    ],
)
@pytest.mark.parametrize("path", ["/jobs", "/healthz"])
def test_unknown_hosts_are_refused(client, host, path):
    answer = client.get(path, headers={"Host": host.encode("latin-1")})
    assert (answer.status_code, answer.json()["code"]) == (421, "misdirected_request")
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert "evil" not in answer.text


def test_two_host_headers_are_refused(app, client):
    answer = client.get("/jobs", headers=[("Host", "localhost"), ("Host", "evil.example")])
    assert answer.status_code == 421


def test_allowed_hosts_can_be_configured(settings):
    app = create_app(settings.model_copy(update={"allowed_hosts": "Rocket.example, other"}), address="my-name")
    with local_client(app) as client:
        for host in ("rocket.example", "ROCKET.EXAMPLE:443", "other", "my-name:8000"):
            assert client.get("/healthz", headers={"Host": host}).status_code == 200
        assert client.get("/healthz", headers={"Host": "x.rocket.example"}).status_code == 421


@pytest.mark.parametrize(
    ("address", "host", "status"),
    [
        ("192.168.1.5", "192.168.1.5:8000", 200),
        ("::ffff:192.168.1.5", "192.168.1.5:8000", 200),
        ("192.168.1.5", "192.168.1.6:8000", 421),
        ("fd00::5", "[FD00:0::5]:8000", 200),
        ("fd00::5", "[fd00::6]", 421),
    ],
)
def test_on_all_addresses_the_called_address_is_an_allowed_host(public_app, address, host, status):
    async def as_server(scope, receive, send):
        if scope["type"] == "http":
            scope["server"] = (address, 8000)
        await public_app(scope, receive, send)

    with local_client(as_server) as client:
        assert client.get("/healthz", headers={"Host": host}).status_code == status


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},
        {"Origin": "http://localhost.evil.example"},
        {"Origin": "localhost"},
        {"Origin": ""},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://localhost", "Sec-Fetch-Site": "cross-site"},
    ],
)
def test_cross_origin_requests_change_nothing(client, submitted, headers):
    for method, path in (
        ("POST", "/jobs"),
        ("POST", f"/jobs/{submitted}/cancel"),
        ("DELETE", f"/jobs/{submitted}"),
        ("PUT", "/"),
    ):
        answer = client.request(method, path, json=BODY, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (403, "permission_denied")
    assert client.get(f"/jobs/{submitted}").json()["status"] == "queued"


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://localhost"}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}]
)
def test_same_origin_pages_may_submit(client, headers):
    assert client.post("/jobs", json=BODY, headers=headers).status_code == 202


@pytest.mark.parametrize(
    ("scopes", "method", "path", "status"),
    [
        (["read"], "GET", "/jobs", 200),
        (["read"], "POST", "/jobs", 403),
        (["read"], "POST", "/jobs/x/cancel", 403),
        (["read"], "DELETE", "/jobs/x", 403),
        (["read"], "GET", "/metrics", 403),
        (["read"], "BREW", "/jobs", 403),
        (["write"], "POST", "/jobs", 202),
        (["write"], "GET", "/jobs", 403),
        (["write"], "GET", "/metrics/", 403),
        (["metrics"], "GET", "/jobs", 403),
        (["metrics"], "POST", "/jobs", 403),
        (["read", "write"], "POST", "/jobs", 202),
    ],
)
def test_a_key_is_limited_to_its_scopes(client, make_key, scopes, method, path, status):
    answer = client.request(method, path, json=BODY, headers=bearer(make_key(scopes=scopes)))
    assert answer.status_code == status, answer.text
    if status == 403:
        assert "scope" in answer.json()["detail"]


def test_the_openapi_document_declares_authentication(client):
    document = client.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["api_key"]["scheme"] == "bearer"
    for path, item in document["paths"].items():
        for operation in item.values():
            assert bool(operation.get("security")) == (path not in PUBLIC_PATHS)


def test_authentication_fails_while_the_database_is_down(client, context, make_key, monkeypatch):
    key = make_key()

    def fail(_self):
        raise DatabaseUnavailableError("the database does not answer (x); try again later")

    monkeypatch.setattr(type(context.database), "snapshot", fail)
    for headers in ({}, bearer(key)):
        answer = client.get("/models", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (503, "database_unavailable")


def test_rate_limits_count_each_tenant_alone(settings, make_key):
    app = create_app(settings.model_copy(update={"rate_limit": "3/minute", "submit_rate_limit": "1/minute"}))
    alice, bob = bearer(make_key("alice")), bearer(make_key("bob"))
    second_of_alice = bearer(make_key("alice"))
    with local_client(app) as client:
        assert [client.get("/models", headers=alice).status_code for _ in range(3)] == [200] * 3
        answer = client.get("/models", headers=second_of_alice)
        assert (answer.status_code, answer.json()["code"]) == (429, "rate_limited")
        assert 1 <= int(answer.headers["Retry-After"]) <= 60
        assert client.get("/models", headers=bob).status_code == 200
        for _ in range(5):
            assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200
        assert client.post("/jobs", json=BODY, headers=bob).status_code == 202
        assert client.post("/jobs", json=BODY, headers=bob).status_code == 429


def test_without_keys_rate_limits_count_addresses(settings):
    app = create_app(settings.model_copy(update={"rate_limit": "1/minute"}))
    with local_client(app) as client:
        assert [client.get("/models").status_code for _ in range(2)] == [200, 429]
    with TestClient(app, base_url="http://localhost", client=("127.0.0.2", 1)) as other:
        assert other.get("/models").status_code == 200


def test_failed_authentication_is_limited_and_valid_keys_are_not(client, make_key):
    key = make_key()
    wrong = {"Authorization": f"Bearer rk_{'0' * 16}_{'0' * 64}"}
    statuses = [client.get("/jobs", headers=wrong).status_code for _ in range(35)]
    assert statuses == [401] * 30 + [429] * 5
    assert client.get("/jobs", headers=bearer(key)).status_code == 200


def test_cancelling_does_not_count_as_a_submission(settings, submitted):
    app = create_app(settings.model_copy(update={"submit_rate_limit": "1/hour"}))
    with local_client(app) as client:
        assert [client.post(f"/jobs/{submitted}/cancel").status_code for _ in range(3)] == [200] * 3
        assert client.post(f"/jobs/{submitted}/retry").status_code == 202
        assert client.post(f"/jobs/{submitted}/retry").status_code == 429
