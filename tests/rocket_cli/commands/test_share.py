"""`rocket share`: the link that it prints, and what ends it."""

import json

import httpx2
import pytest

FILES = {"rocket/model.safetensors": b"weights", "report.json": b"{}"}


@pytest.fixture
def job_id(service):
    return service.succeeded(FILES)


def status_of(url):
    return httpx2.get(url, trust_env=False).status_code


def test_the_link_is_printed_and_ended(remote, server, client, job_id):
    outcome = remote("share", job_id)
    url = outcome.out.strip()
    assert url.startswith(f"{server.url}/ui/shared/rl_")
    assert "sees the report of" in outcome.err
    assert f"rocket share {job_id} --end" in outcome.err
    assert status_of(url) == 200
    assert client.get_link(job_id).with_files is False
    ended = remote("share", job_id, "--end")
    assert (ended.code, ended.out) == (0, "")
    assert status_of(url) == 404
    again = remote("share", job_id, "--end")
    assert (again.code, "has no link" in again.err) == (7, True)


def test_files_are_given_if_asked_for(remote, job_id):
    made = json.loads(remote("share", job_id, "--with-files", "--json").out)
    assert made["with_files"] is True
    assert httpx2.get(f"{made['url']}/files/report.json", trust_env=False).content == b"{}"
    assert remote("share", job_id, "--with-files", "--end").code == 2


@pytest.mark.both_clients
def test_the_clients_create_and_end_links(client, job_id):
    made = client.create_link(job_id, with_files=True)
    assert (made.with_files, client.get_link(job_id).created_at) == (True, made.created_at)
    client.delete_link(job_id)
    assert status_of(made.url) == 404
