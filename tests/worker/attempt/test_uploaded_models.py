"""Uploaded models from the first request to the result of a job."""

import os
import threading

import pytest

from app.shared.errors import ModelNotReadyError, StorageError, UploadedModelNotFoundError
from app.shared.storage import open_store
from tests.reference.model_uploads import announce, send_heads, upload
from tests.reference.tiny_models import save_tiny_model
from tests.worker.threads import ThreadedAttempt as Attempt
from worker.attempt.uploaded_models import fetch_model

QUICK = {
    "model_id": "upload/mine",
    "calibration": {"samples": 2, "sequence_length": 16},
    "options": {"ignore": ["*.mlp.*", "*.k_proj", "*.v_proj", "*.o_proj"]},
}


@pytest.fixture
def settings(request, configure):
    is_s3 = getattr(request, "param", "local") == "s3"
    return configure(**(request.getfixturevalue("s3_settings") if is_s3 else {}))


@pytest.fixture
def folder(tmp_path):
    return save_tiny_model("llama", tmp_path / "published")


@pytest.fixture
def fetch(database, settings, tmp_path):
    def fetch(name="mine", before_each=lambda: None, target="copy"):
        store = open_store(settings)
        return fetch_model(database, store, "local", name, folder=tmp_path / target, before_each=before_each)

    return fetch


@pytest.mark.parametrize("settings", ["local", "s3"], indirect=True)
@pytest.mark.usefixtures("s3_server")  # before the threads are counted
def test_a_job_compresses_an_uploaded_model(client, folder, submit, settings, database, claim, look, work):
    upload(client, folder)
    job_id = submit(**QUICK)
    Attempt(settings, database, claim(job_id), threading.Event()).run(os.getppid())
    job = look(job_id)
    assert (job.status, job.error) == ("succeeded", None)
    # What remains are the headers of the model.
    assert [path.name for path in work.glob("*/*")] == ["headers"]


def test_a_fetched_model_is_the_one_that_was_sent(client, folder, fetch):
    upload(client, folder)
    copy = fetch()
    assert copy.name == "mine"
    sent, got = ({file.name: file.read_bytes() for file in where.iterdir()} for where in (folder, copy))
    assert got == sent
    times = {file.name: file.stat().st_mtime_ns for file in copy.iterdir()}
    assert {file.name: file.stat().st_mtime_ns for file in fetch().iterdir()} == times


def test_a_copy_of_an_earlier_model_is_replaced(client, folder, fetch):
    upload(client, folder)
    fetch()
    client.delete("/models/mine")
    (folder / "generation_config.json").write_text('{"do_sample": true}')
    upload(client, folder)
    assert (fetch() / "generation_config.json").read_text() == '{"do_sample": true}'


def test_a_copy_can_be_interrupted(client, folder, fetch, tmp_path):
    upload(client, folder)
    pieces = []

    def stop():
        pieces.append(1)
        if len(pieces) == 3:
            raise InterruptedError

    with pytest.raises(StorageError):
        fetch(before_each=stop)
    assert not (tmp_path / "copy" / "mine" / "model.safetensors").exists()
    assert list((tmp_path / "copy" / "mine").glob("*.tmp")) == []
    assert (fetch() / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_an_incomplete_or_damaged_model_is_not_fetched(client, folder, fetch, settings):
    with pytest.raises(UploadedModelNotFoundError):
        fetch("none")
    announce(client, folder, "begun")
    send_heads(client, folder, "begun")
    with pytest.raises(ModelNotReadyError, match="continue the upload"):
        fetch("begun")
    upload(client, folder)
    largest = max((settings.data_dir / "artifacts").iterdir(), key=lambda file: file.stat().st_size)
    largest.write_bytes(bytes(largest.stat().st_size))
    with pytest.raises(StorageError, match="is damaged in the store"):
        fetch()
