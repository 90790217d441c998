"""The API key: to whom the client sends it, and messages if it is refused."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx2
import pytest

from app.shared.repositories import keys
from rocket_client._wire import KeyAuth
from rocket_client.errors import InvalidArgumentError, ProblemError, UnexpectedAnswerError

KEY = "rk_0123456789abcdef_" + "0" * 64


class Recorder(HTTPServer):
    """A server that records what it receives, and answers with a redirect or with nothing."""

    def __init__(self, location=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.location = location
        self.seen = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self):
        self.shutdown()
        self._thread.join()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.seen.append(self.headers.get("Authorization"))
        self.send_response(307 if self.server.location else 200)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def other():
    server = Recorder()
    yield server
    server.close()


@pytest.fixture
def first(other):
    server = Recorder(location=f"{other.url}/elsewhere")
    yield server
    server.close()


@pytest.fixture
def make_key(service):
    return lambda **options: service.do(keys.create_key, "alice", **options).text


@pytest.mark.both_clients
def test_a_key_is_not_sent_along_a_redirect(connect, first, other):
    with connect(first.url, api_key=KEY, patience=0) as rocket, pytest.raises(UnexpectedAnswerError):
        rocket.models()
    assert first.seen == [f"Bearer {KEY}"]
    assert other.seen == []


@pytest.mark.parametrize("way", ["redirect", "asked for"])
def test_a_key_is_never_sent_to_another_server(first, other, way):
    # Even for code that follows redirects, or requests an absolute URL with the same connections.
    with httpx2.Client(auth=KeyAuth(KEY, httpx2.URL(first.url)), trust_env=False, follow_redirects=True) as http:
        http.get(first.url if way == "redirect" else other.url)
    assert other.seen == [None]
    assert first.seen == ([f"Bearer {KEY}"] if way == "redirect" else [])


@pytest.mark.both_clients
def test_a_key_comes_from_the_environment_unless_given(connect, first, monkeypatch):
    monkeypatch.setenv("ROCKET_API_KEY", f" {KEY}\n")
    for options, sent in (({}, f"Bearer {KEY}"), ({"api_key": "rk_other"}, "Bearer rk_other"), ({"api_key": ""}, None)):
        with connect(first.url, patience=0, **options) as rocket, pytest.raises(UnexpectedAnswerError):
            rocket.models()
        assert first.seen.pop() == sent
    monkeypatch.setenv("ROCKET_API_KEY", "")
    with connect(first.url, patience=0) as rocket, pytest.raises(UnexpectedAnswerError):
        rocket.models()
    assert first.seen == [None]


@pytest.mark.both_clients
@pytest.mark.parametrize("key", ["rk_a b", "rk_ä", "rk_a\nX-Evil: 1", "rk_\x00"])
def test_an_invalid_key_is_refused_and_not_echoed(connect, key):
    with pytest.raises(InvalidArgumentError) as refused:
        connect("http://127.0.0.1:1", api_key=key)
    assert key not in str(refused.value)


def test_a_command_without_a_key_names_the_variable_to_set(remote, make_key):
    make_key()
    outcome = remote("jobs")
    assert (outcome.code, outcome.out) == (77, "")
    assert "set ROCKET_API_KEY" in outcome.err


def test_a_command_with_a_wrong_key_says_so_without_echoing_it(remote, make_key, monkeypatch):
    make_key()
    monkeypatch.setenv("ROCKET_API_KEY", KEY)
    outcome = remote("jobs", "--json")
    assert outcome.code == 77
    assert "in ROCKET_API_KEY" in outcome.err
    assert KEY.rsplit("_", 1)[1] not in outcome.err + outcome.out


def test_commands_work_with_a_key(remote, make_key, monkeypatch):
    monkeypatch.setenv("ROCKET_API_KEY", make_key())
    submitted = remote("submit", "local/tiny", "--ratio", "0.3")
    assert submitted.code == 0
    assert submitted.out.strip() in remote("jobs").out


def test_a_read_only_key_is_told_the_missing_scope(remote, make_key, monkeypatch):
    monkeypatch.setenv("ROCKET_API_KEY", make_key(scopes=["read"]))
    assert remote("jobs").code == 0
    outcome = remote("submit", "local/tiny", "--ratio", "0.3")
    assert outcome.code == 77
    assert "scope `write`" in outcome.err


@pytest.mark.both_clients
def test_a_refused_key_is_not_retried(connect, server, make_key):
    make_key()
    with connect(server.url, api_key=KEY, patience=30) as rocket, pytest.raises(ProblemError) as refused:
        rocket.models()
    assert not refused.value.retryable
