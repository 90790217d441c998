"""Proxies in front of the service: what their headers may say, and from whom they are accepted."""

import pytest
from starlette.testclient import TestClient

from app.api.paths import SESSION_COOKIE
from app.main import create_app
from app.services.proxies import TrustedProxies
from app.shared.repositories import keys
from app.shared.settings.networks import parse_networks
from tests.app.conftest import local_client

PROXY = "10.0.0.2"
HSTS = "max-age=31536000"


@pytest.fixture
def make_app(settings):
    apps = []

    def make_app(trusted, **options):
        app = create_app(settings.model_copy(update={"trusted_proxies": trusted} | options))
        apps.append(app)
        return app

    yield make_app
    for app in apps:
        app.state.context.database.close()


@pytest.fixture
def key(context):
    with context.database.transaction() as session:
        return keys.create_key(session, "alice")


def client_from(app, peer):
    return TestClient(app, base_url="http://localhost", client=(peer, 1), raise_server_exceptions=False)


def sign_in(client, key, **headers):
    return client.post("/ui/sign-in", data={"key": key.text}, headers=headers, follow_redirects=False)


@pytest.mark.parametrize(
    ("hops", "client"),
    [
        (["203.0.113.9"], "203.0.113.9"),
        (["127.0.0.1", "203.0.113.9"], "203.0.113.9"),
        (["127.0.0.1", "203.0.113.9", "10.0.0.3"], "203.0.113.9"),
        (["203.0.113.9:4711"], "203.0.113.9"),
        (["[2001:db8::1]:4711"], "2001:db8::1"),
        (["2001:db8::1"], "2001:db8::1"),
        (["::ffff:203.0.113.9"], "203.0.113.9"),
        (["203.0.113.9", "unknown"], PROXY),
        (["203.0.113.9", ""], PROXY),
        (["203.0.113.9", "garbage", "10.0.0.3"], "10.0.0.3"),
        (["10.0.0.4", "10.0.0.3"], "10.0.0.4"),
        ([], PROXY),
    ],
)
def test_the_client_is_the_rightmost_address_that_is_not_trusted(hops, client):
    assert TrustedProxies(parse_networks("10.0.0.0/24")).find_client(PROXY, hops) == client


@pytest.mark.parametrize("address", ["10.0.0.2", "::ffff:10.0.0.2", "10.0.0.255"])
def test_a_trusted_network_includes_all_its_addresses(address):
    trusted = TrustedProxies(parse_networks("10.0.0.0/24"))
    assert address in trusted
    assert "10.0.1.2" not in trusted
    assert "proxy" not in trusted


@pytest.mark.parametrize(
    ("trusted", "forwarded", "is_secure"),
    [
        (PROXY, {"X-Forwarded-Proto": "https"}, True),
        (PROXY, {"X-Forwarded-Proto": "http"}, False),
        (PROXY, {"X-Forwarded-Proto": "http, https"}, True),
        (PROXY, {"X-Forwarded-Proto": "https, http"}, False),
        (PROXY, {"X-Forwarded-Proto": "gopher"}, False),
        (PROXY, {}, False),
        ("10.0.0.3", {"X-Forwarded-Proto": "https"}, False),
        ("", {"X-Forwarded-Proto": "https"}, False),
    ],
)
def test_cookie_and_hsts_follow_the_trusted_proxys_scheme(make_app, key, trusted, forwarded, is_secure):
    with client_from(make_app(trusted), PROXY) as client:
        answer = sign_in(client, key, **forwarded)
        assert answer.status_code == 303, answer.text
        cookie = answer.headers["Set-Cookie"]
        assert cookie.startswith(f"{SESSION_COOKIE}=")
        assert ("secure" in cookie.lower()) == is_secure
        for path in ("/healthz", "/nowhere", "/ui/static/pages.css", "/jobs"):
            answer = client.get(path, headers=forwarded)
            assert answer.headers.get("Strict-Transport-Security") == (HSTS if is_secure else None), path


def test_even_an_unexpected_error_has_hsts(make_app):
    app = make_app("127.0.0.1")
    app.add_api_route("/broken", lambda: 1 / 0)
    with local_client(app) as client:
        answer = client.get("/broken", headers={"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "https"})
    assert (answer.status_code, answer.headers["Strict-Transport-Security"]) == (500, HSTS)


def test_clients_of_a_trusted_proxy_have_separate_sign_in_limits(make_app, key):
    class Guess:
        text = "rk_" + "0" * 16 + "_" + "0" * 64

    with client_from(make_app(PROXY), PROXY) as client:
        statuses = [sign_in(client, Guess, **{"X-Forwarded-For": "203.0.113.9"}).status_code for _ in range(40)]
        assert statuses == [401] * 30 + [429] * 10
        # A forged entry to the left changes nothing.
        forged = {"X-Forwarded-For": "198.51.100.1, 203.0.113.9"}
        assert sign_in(client, Guess, **forged).status_code == 429
        assert sign_in(client, key, **{"X-Forwarded-For": "203.0.113.10"}).status_code == 303


@pytest.mark.parametrize("peer", ["127.0.0.1", "203.0.113.9"])
def test_forwarding_headers_do_not_evade_the_failure_limit(make_app, peer):
    wrong = {"Authorization": f"Bearer rk_{'0' * 16}_{'0' * 64}"}
    with client_from(make_app(PROXY), peer) as client:
        statuses = [
            client.get("/jobs", headers=wrong | {"X-Forwarded-For": f"198.51.100.{number}"}).status_code
            for number in range(35)
        ]
    assert statuses == [401] * 30 + [429] * 5


FORWARDED = [
    {"X-Forwarded-For": "203.0.113.9"},
    {"X-Forwarded-For": "127.0.0.1"},
    {"X-Forwarded-For": ""},
    {"X-Forwarded-Proto": "https"},
    {"X-Forwarded-Host": "localhost"},
    {"X-Forwarded-Port": "443"},
    {"X-Real-IP": "127.0.0.1"},
    {"Forwarded": "for=127.0.0.1"},
    {"Via": "1.1 proxy"},
]


@pytest.mark.parametrize("forwarded", FORWARDED, ids=str)
def test_clients_of_an_unknown_local_proxy_are_not_local(make_app, forwarded):
    with local_client(make_app("")) as client:
        assert client.get("/jobs").status_code == 200
        for path in ("/jobs", "/nowhere", "/metrics"):
            answer = client.get(path, headers=forwarded)
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")
            assert "rocket admin keys create" in answer.json()["detail"]
            assert "ROCKET_TRUSTED_PROXIES" in answer.json()["detail"]
            assert "203.0.113.9" not in answer.text
        assert client.get("/healthz", headers=forwarded).status_code == 200


@pytest.mark.parametrize(
    ("forwarded", "status"),
    [
        ({"X-Forwarded-For": "127.0.0.1"}, 200),
        ({"X-Forwarded-For": "::1"}, 200),
        ({"X-Forwarded-For": "203.0.113.9"}, 401),
        # Written by a proxy that appends to what its client has forged.
        ({"X-Forwarded-For": "127.0.0.1, 203.0.113.9"}, 401),
        ({"X-Forwarded-For": "203.0.113.9, 127.0.0.1"}, 401),
        ({"X-Forwarded-For": "127.0.0.1, unknown"}, 401),
        ({"X-Forwarded-For": "unknown"}, 401),
        ({"X-Forwarded-For": ""}, 401),
        ({"X-Forwarded-Proto": "https"}, 401),
        # The proxy does not name its client.
        ({}, 401),
    ],
)
@pytest.mark.parametrize("trusted", ["127.0.0.1", "127.0.0.0/8"])
def test_a_trusted_proxys_client_is_local_only_on_the_loopback(make_app, trusted, forwarded, status):
    with local_client(make_app(trusted)) as client:
        answer = client.get("/jobs", headers=forwarded)
        assert answer.status_code == status, answer.text


def test_a_key_works_behind_any_proxy(make_app, key):
    bearer = {"Authorization": f"Bearer {key.text}"}
    for trusted in ("", "127.0.0.1"):
        with local_client(make_app(trusted)) as client:
            for forwarded in FORWARDED:
                assert client.get("/jobs", headers=bearer | forwarded).status_code == 200
