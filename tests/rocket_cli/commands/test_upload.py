import json
import tracemalloc

import pytest

from app.shared.encryption import decrypt
from app.shared.models import Job
from rocket_client.errors import InvalidArgumentError

LINES = '{"text": "one"}\n{"text": "two"}\n'
TOKEN = "hf_canary0123456789"  # noqa: S105 - no real one


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text(LINES)
    return file


def test_the_upload_id_goes_to_stdout(remote, client, file):
    outcome = remote("upload", file)
    name = outcome.out.strip()
    assert outcome.code == 0
    assert f"2 documents; use them with `rocket submit ... --calibration {name}`" in outcome.err
    assert name in client.calibrations()
    assert remote("submit", "local/tiny", "--ratio", "0.3", "--calibration", name).code == 0
    assert client.list_jobs().data[0].calibration.dataset == name
    assert json.loads(remote("upload", file, "--json").out)["id"] == name


@pytest.mark.both_clients
def test_a_file_is_uploaded_without_loading_it_into_memory(client, tmp_path):
    file = tmp_path / "long.txt"
    file.write_bytes((b"word " * 2000 + b"\n") * 1600)
    # The server's part in this process also takes constant memory.
    tracemalloc.start()
    try:
        assert client.upload(file).documents == 1
        assert tracemalloc.get_traced_memory()[1] < file.stat().st_size / 2
    finally:
        tracemalloc.stop()


@pytest.mark.both_clients
def test_an_upload_can_be_deleted(client, file):
    kept = client.upload(file)
    assert client.get_upload(kept.id) == kept
    client.delete_upload(kept.id)
    assert kept.id not in client.calibrations()
    with pytest.raises(InvalidArgumentError, match="is not an upload id"):
        client.delete_upload("local/mine.jsonl")


def test_an_unusable_file_is_refused(remote, tmp_path, file):
    (tmp_path / "a.csv").touch()
    assert remote("upload", tmp_path / "a.csv").code == 2
    assert remote("upload", tmp_path / "none.txt").code == 2
    file.write_text("no json")
    outcome = remote("upload", file)
    assert outcome.code == 3
    assert "line 1 is not valid JSON" in outcome.err


@pytest.mark.both_clients
def test_an_estimate_has_typed_members(client):
    told = client.estimate("local/tiny", ratio=0.3)
    assert told.kept_parameters < told.compressible_parameters < told.parameters


def test_a_token_comes_from_the_environment(remote, service, client, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    options = ("--ratio", "0.3", "--calibration", "c4", "--hub-token-env", "MY_TOKEN")
    assert remote("submit", "local/tiny", *options).code == 0
    with service.database.snapshot() as session:
        stored = session.get_one(Job, client.list_jobs().data[0].id).hub_token
    assert decrypt(service.settings, stored).get_secret_value() == TOKEN


def test_a_token_given_as_variable_name_is_not_echoed(remote, client):
    outcome = remote("submit", "local/tiny", "--ratio", "0.3", "--hub-token-env", TOKEN)
    assert outcome.code == 2
    assert "canary" not in outcome.err + outcome.out
    assert client.list_jobs().data == ()
