import json
from pathlib import Path

import pytest

from rocket_cli.commands.download import bytes_view
from rocket_cli.connection import OutageNotice
from rocket_client._wire import TransferProgress

FILES = {"rocket/model.safetensors": b"weights" * 1000, "dense/model.safetensors": b"w", "report.json": b"{}"}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def job_id(service):
    return service.succeeded(FILES)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


def test_the_folder_has_the_jobs_name_and_stdout_only_its_path(remote, job_id):
    outcome = remote("download", job_id)

    assert (outcome.code, outcome.out) == (0, f"{Path.cwd() / job_id}\n")
    assert (Path(job_id) / "rocket/model.safetensors").read_bytes() == FILES["rocket/model.safetensors"]
    assert "3 files of 7.00 kB, verified by their SHA-256" in outcome.err


def test_folder_and_export_can_be_chosen(remote, job_id):
    outcome = remote("download", job_id, "here", "--export", "dense")

    assert outcome.out == f"{Path.cwd() / 'here'}\n"
    assert {str(path.relative_to("here")) for path in Path("here").rglob("*.*")} == {
        *("dense/model.safetensors", "report.json"),
    }


def test_a_repeated_download_reports_existing_files(remote, job_id):
    remote("download", job_id, "here")
    Path("here/report.json").write_text("[]")

    outcome = remote("download", job_id, "here")

    assert f"{Path.cwd()}/here/report.json differed and was replaced" in outcome.err
    assert "2 of them already present" in outcome.err
    assert Path("here/report.json").read_bytes() == b"{}"


def test_json_names_every_file(remote, job_id):
    outcome = remote("download", job_id, "here", "--json")

    written = json.loads(outcome.out)
    assert (outcome.code, outcome.err) == (0, "")
    assert written["folder"] == str(Path.cwd() / "here")
    assert {file["name"]: (file["size"], file["outcome"]) for file in written["files"]} == {
        name: (len(content), "downloaded") for name, content in FILES.items()
    }


def test_a_damaged_file_is_reported(remote, service, job_id):
    service.stored_file(FILES["dense/model.safetensors"]).write_bytes(b"x")

    outcome = remote("download", job_id)

    assert (outcome.code, outcome.out) == (6, "")
    assert "dense/model.safetensors has the SHA-256" in outcome.err


def test_an_impossible_folder_is_reported(remote, job_id):
    Path("file").touch()

    outcome = remote("download", job_id, "file/below")

    assert outcome.code == 2
    assert "file/below" in outcome.err


def test_a_job_that_has_not_succeeded_has_nothing_to_download(remote, service):
    job_id = service.submit()

    outcome = remote("download", job_id)

    assert outcome.code == 8
    assert "only a job that has succeeded has artifacts" in outcome.err
    assert not Path(job_id).exists()


def test_progress_is_shown_in_bytes():
    shown = []
    clock = Clock()
    view = type("View", (), {"show": lambda self, *state: shown.append(state)})()
    show = bytes_view(view, OutageNotice("server", quiet=True), clock)
    for seconds, done, received in ((0.1, 10, 10), (10.0, 1_500_000, 1_000_000), (10.0, 3_000_000, 0)):
        clock.now = seconds
        show(TransferProgress(name="a/b", done=done, total=3_000_000, received=received))

    assert shown == [
        ("downloading", "10 bytes of 3.00 MB a/b", pytest.approx(0, abs=1e-5), None),
        ("downloading", "1.50 MB of 3.00 MB a/b", 0.5, pytest.approx(15)),
        ("downloading", "3.00 MB of 3.00 MB a/b", 1.0, None),
    ]
