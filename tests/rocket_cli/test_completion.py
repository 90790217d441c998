import socket
import time

import pytest

from rocket_cli import completion
from tests.loopback_service import free_port


@pytest.fixture
def complete(rocket, monkeypatch):
    """Return what a shell offers at the end of a line."""

    def complete(line):
        monkeypatch.setenv("_ROCKET_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        outcome = rocket()
        assert (outcome.code, outcome.err) == (0, "")
        return outcome.out.split()

    return complete


@pytest.fixture
def known(server, monkeypatch):
    # A busy machine takes longer than a user waits.
    monkeypatch.setattr(completion, "_SECONDS", 60)
    monkeypatch.setenv("ROCKET_SERVER", server.url)


@pytest.mark.parametrize("command", ["watch", "cancel", "retry", "report", "download", "jobs --after"])
def test_jobs_are_completed_newest_first(complete, known, service, command):
    ids = [service.submit() for _ in range(2)]

    assert complete(f"rocket {command} job_") == ids[::-1]
    assert complete(f"rocket {command} {ids[0]}") == ids[:1]
    assert complete(f"rocket {command} x") == []


def test_frontier_completes_profiles_and_jobs_that_have_one(complete, known, service):
    service.submit()
    job_id = service.submit()
    profile_id = service.profile_model(service.claim(job_id))

    assert complete("rocket frontier ") == [job_id, profile_id]
    assert complete("rocket frontier prof") == [profile_id]


def test_models_calibrations_and_statuses_are_completed(complete, known):
    assert complete("rocket submit lo") == ["local/tiny"]
    assert complete("rocket submit local/tiny --calibration local") == ["local/mine.jsonl"]
    assert complete("rocket estimate lo") == ["local/tiny"]
    assert complete("rocket estimate local/tiny --calibration local") == ["local/mine.jsonl"]
    assert complete("rocket jobs --status c") == ["cancelling", "cancelled"]


def test_completion_asks_the_server_on_the_command_line(complete, server, monkeypatch):
    monkeypatch.setattr(completion, "_SECONDS", 60)
    monkeypatch.setenv("ROCKET_SERVER", f"http://127.0.0.1:{free_port()}")

    assert complete("rocket submit lo") == []
    assert complete(f"rocket submit --server {server.url} lo") == ["local/tiny"]


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "no address", "http://name.invalid"])
def test_without_a_server_nothing_is_completed(complete, monkeypatch, address):
    monkeypatch.setenv("ROCKET_SERVER", address)

    assert complete("rocket watch job_") == []


def test_completion_does_not_wait_for_a_silent_server(complete, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("ROCKET_SERVER", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        assert complete("rocket watch job_") == []

    assert time.monotonic() - began < 30


def test_a_server_that_refuses_completes_nothing(complete, known, service, monkeypatch):
    monkeypatch.setenv("ROCKET_API_KEY", "rk_ü")

    assert complete("rocket watch job_") == []
