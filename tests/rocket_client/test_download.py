import hashlib
import os
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest

from app.api.routes import artifacts
from app.services import outputs
from app.shared.repositories import sweeps
from rocket_client._download import Outcome, only_download, safe_paths
from rocket_client.errors import (
    DigestMismatchError,
    FolderBusyError,
    NotEnoughDiskError,
    NothingToDownloadError,
    ProblemError,
    UnsafeNameError,
)
from tests.loopback_service import ServerProcess, in_background, wait_for

pytestmark = pytest.mark.both_clients

WEIGHTS = bytes(range(256)) * 4096
FILES = {
    "rocket/model.safetensors": WEIGHTS,
    "rocket/config.json": b"{}",
    "dense/model.safetensors": WEIGHTS[::-1],
    "dense/sub folder/ü#?%2F.json": b"[]",
    "report.json": b'{"report": 1}',
    "empty": b"",
}
PART = "rocket/model.safetensors.part"


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def job_id(service):
    return service.succeeded(FILES)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out" / "here"


@pytest.fixture
def part(folder):
    (folder / "rocket").mkdir(parents=True)
    return folder / PART


def received(client, job_id, folder):
    """Download, and return the number of bytes received over the network."""
    seen = [0]
    client.download(job_id, folder, on_progress=lambda progress: seen.append(progress.received))
    return seen[-1]


def test_all_artifacts_are_downloaded_under_their_names(client, job_id, folder):
    files = client.download(job_id, folder)

    assert contents(folder) == FILES
    assert {file.artifact.name for file in files} == set(FILES)
    assert {file.outcome for file in files} == {Outcome.DOWNLOADED}
    assert all(file.path == folder / file.artifact.name for file in files)


def test_progress_counts_bytes_up_to_the_total(client, job_id, folder):
    told = []
    client.download(job_id, folder, on_progress=told.append)

    total = sum(map(len, FILES.values()))
    done = [progress.done for progress in told]
    assert {progress.total for progress in told} == {total}
    assert done == sorted(done)
    assert done[-1] == total


@pytest.mark.parametrize("name", ["rocket", "factored"])
def test_only_the_requested_exports_are_downloaded(client, job_id, folder, name):
    client.download(job_id, folder, exports=[name])

    assert set(contents(folder)) == {"rocket/model.safetensors", "rocket/config.json", "report.json", "empty"}


def test_a_missing_export_is_refused_with_the_existing_ones(client, job_id, folder):
    with pytest.raises(NothingToDownloadError, match="no export 'gguf'; it has dense and rocket"):
        client.download(job_id, folder, exports=["gguf"])
    assert not folder.exists()


def test_existing_files_are_verified_and_kept(client, job_id, folder):
    client.download(job_id, folder)
    before = (folder / "report.json").stat().st_mtime_ns

    files = client.download(job_id, folder)

    assert {file.outcome for file in files} == {Outcome.KEPT}
    assert (folder / "report.json").stat().st_mtime_ns == before
    assert received(client, job_id, folder) == 0


def test_wrong_files_are_replaced_and_reported(client, job_id, folder):
    client.download(job_id, folder)
    (folder / "rocket/config.json").write_bytes(b"[]")
    (folder / "dense/model.safetensors").write_bytes(b"short")

    files = client.download(job_id, folder)

    assert contents(folder) == FILES
    assert {file.artifact.name for file in files if file.outcome is Outcome.REPLACED} == {
        *("rocket/config.json", "dense/model.safetensors"),
    }


@pytest.mark.parametrize("cut", [1, 4096, len(WEIGHTS) - 1, len(WEIGHTS)])
def test_a_partial_file_is_resumed(client, job_id, folder, part, cut):
    part.write_bytes(WEIGHTS[:cut])

    assert received(client, job_id, folder) == sum(map(len, FILES.values())) - cut
    assert contents(folder) == FILES


@pytest.mark.parametrize(
    "left", [b"x" * 5000, WEIGHTS[:-1] + b"x", WEIGHTS + b"x"], ids=["other", "last byte", "longer"]
)
def test_an_invalid_partial_file_is_restarted(client, job_id, folder, part, left):
    part.write_bytes(left)

    client.download(job_id, folder)

    assert contents(folder) == FILES


def test_a_range_is_requested_only_of_the_same_content(client, job_id, folder, part, monkeypatch):
    part.write_bytes(WEIGHTS[:1000])
    asked = []
    real = artifacts.requested_ranges

    def spy(header, size):
        asked.append(header)
        return real(header, size)

    monkeypatch.setattr(artifacts, "requested_ranges", spy)
    client.download(job_id, folder)

    assert [header for header in asked if header] == ["bytes=1000-"]


def test_partial_bytes_of_another_content_are_not_resumed(client, service, job_id, folder, part):
    part.write_bytes(b"old" * 1000)
    client.download(job_id, folder)
    assert contents(folder) == FILES


def test_a_tampered_file_is_refused(client, service, job_id, folder):
    service.stored_file(WEIGHTS).write_bytes(b"x" + WEIGHTS[1:])

    with pytest.raises(DigestMismatchError, match=hashlib.sha256(WEIGHTS).hexdigest()):
        client.download(job_id, folder)

    assert "rocket/model.safetensors" not in contents(folder)
    assert PART not in contents(folder)


def test_a_file_longer_than_announced_is_refused(client, job_id, folder, monkeypatch):
    real = outputs.open_artifact

    def longer(*arguments):
        download = real(*arguments)
        if download.artifact.name != "rocket/model.safetensors":
            return download
        download.artifact.size += 4
        return replace(download, read=lambda start, stop: iter([WEIGHTS[start:] + b"more"]))

    monkeypatch.setattr(outputs, "open_artifact", longer)
    with pytest.raises(DigestMismatchError, match="larger"):
        client.download(job_id, folder, exports=["rocket"])

    assert (folder / PART).stat().st_size == 0


def test_a_restarted_server_only_interrupts_a_download(connect, service, folder):
    weights = os.urandom(2**20) * 48
    job_id = service.succeeded({"model.safetensors": weights})
    waits, told = [], []
    with (
        ServerProcess(service.settings.data_dir) as server,
        connect(server.url, patience=5, on_retry=waits.append) as client,
    ):

        def kill_once(progress):
            told.append(progress)
            if len(told) == 1:
                server.kill()

        def start_again():
            wait_for(lambda: waits)
            server.start()

        with in_background(start_again):
            client.download(job_id, folder, on_progress=kill_once)

    assert contents(folder) == {"model.safetensors": weights}
    assert waits
    assert told[-1].received == len(weights), "nothing came twice"


@pytest.mark.parametrize(
    "name", ["../up", "/etc/passwd", "a/../../b", "a//b", "a\\b", "..", ".", "", "a/", "nul\0", "line\nbreak", "./a"]
)
def test_a_name_that_leads_out_of_the_folder_is_refused(name, tmp_path):
    with pytest.raises(UnsafeNameError):
        safe_paths(["good", name], tmp_path)


@pytest.mark.parametrize("names", [["a", "a"], ["a", "a/b"], ["a.part", "a"], ["a.part/b", "a"]])
def test_two_names_of_one_file_are_refused(names, tmp_path):
    with pytest.raises(UnsafeNameError):
        safe_paths(names, tmp_path)


def test_a_file_name_outside_the_folder_writes_nothing(client, service, folder):
    job_id = service.succeeded({"fine": b"1", "../outside": b"2"})

    with pytest.raises(UnsafeNameError, match="outside"):
        client.download(job_id, folder)

    assert not folder.exists()
    assert not (folder.parent / "outside").exists()


def test_two_downloads_do_not_share_a_folder(client, job_id, folder):
    folder.mkdir(parents=True)
    with only_download(folder), pytest.raises(FolderBusyError, match=str(folder)):
        client.download(job_id, folder)

    client.download(job_id, folder)


def test_a_full_disk_is_reported_before_writing(client, job_id, folder, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=4096))

    with pytest.raises(NotEnoughDiskError, match="the download needs"):
        client.download(job_id, folder)
    assert contents(folder) == {}


def test_a_disk_that_fills_up_is_reported_with_the_file(client, job_id, folder, part):
    part.symlink_to("/dev/full")

    with pytest.raises(OSError, match="No space left") as full:
        client.download(job_id, folder)
    assert full.value.filename == str(part)


def test_an_unfinished_job_has_nothing_to_download(client, service, folder):
    with pytest.raises(NothingToDownloadError, match="is queued; only a job that has succeeded"):
        client.download(service.submit(), folder)


def test_an_expired_artifact_is_reported(client, service, folder):
    job_id = service.succeeded({"a": b"1"}, retention=timedelta(0))
    for key in service.do(sweeps.expire_artifacts):
        service.artifacts.remove(key)

    with pytest.raises(ProblemError) as refused:
        client.download(job_id, folder)
    assert refused.value.code == "artifact_expired"
