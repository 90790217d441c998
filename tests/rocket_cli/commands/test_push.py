import json
import os
import signal
import subprocess
import sys

import pytest
from huggingface_hub import constants

from rocket_client.hub_push import Destination, default_folder, push_export
from tests.loopback_service import free_port, wait_for
from tests.reference.upload_hub import TOKEN, UploadHub

WEIGHTS = bytes(range(256)) * 512
SECOND = WEIGHTS[::-1]
FACTORED = {"model-1.safetensors": WEIGHTS, "model-2.safetensors": SECOND, "config.json": b"{}", "README.md": b"# A"}
FILES = {
    **{f"rocket/{name}": content for name, content in FACTORED.items()},
    "dense/model.safetensors": WEIGHTS * 2,
    "report.json": b"{}",
}
REPO = "alice/small"


# A warning of the Hub's client about its own code.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with UploadHub() as hub:
        hub.replace_the_hub(monkeypatch)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield hub


@pytest.fixture
def job_id(service):
    return service.succeeded(FILES)


def test_the_rocket_export_is_pushed_in_one_commit(remote, hub, job_id):
    outcome = remote("push", job_id, REPO)

    assert (outcome.code, outcome.out) == (0, f"{hub.url}/{REPO}\n")
    assert "rocket: 4 files of" in outcome.err
    assert hub.files(REPO) == FACTORED
    assert hub.commits(REPO) == 1
    assert hub.messages == ["local/tiny without 30.0% of its linear parameters, rocket, compressed by Rocket"]


def test_a_repeated_push_sends_and_commits_nothing(remote, hub, job_id):
    remote("push", job_id, REPO)
    received = list(hub.received)

    outcome = remote("push", job_id, REPO, "--json")

    assert json.loads(outcome.out)["is_new"] is False
    assert (hub.received, hub.commits(REPO)) == (received, 1)
    assert sorted(hub.received) == sorted(set(hub.received))


def test_a_failed_push_resumes_without_sending_a_file_twice(remote, hub, job_id, monkeypatch):
    hub.refusals["POST", f"/api/models/{REPO}/commit/"] = (400, "not now")
    failed = remote("push", job_id, REPO)
    assert (failed.code, hub.commits(REPO)) == (2, 0)
    assert "not now" in failed.err
    assert len(hub.received) == 2

    hub.refusals.clear()
    asked = []
    monkeypatch.setattr("rocket_client._download.file_request", lambda *_, **__: asked.append(1))
    assert remote("push", job_id, REPO).code == 0

    assert asked == [], "nothing is downloaded twice"
    assert len(hub.received) == 2, "and nothing is uploaded twice"
    assert hub.files(REPO) == FACTORED


def test_an_interrupted_download_is_resumed(client, hub, job_id, tmp_path):
    part = tmp_path / "rocket" / "model-1.safetensors.part"
    part.parent.mkdir()
    part.write_bytes(WEIGHTS[:1000])
    told = []

    push_export(client, job_id, Destination(repository=REPO), folder=tmp_path, on_progress=told.append)

    assert told[-1].received == sum(map(len, FACTORED.values())) + len(b"{}") - 1000
    assert hub.files(REPO) == FACTORED


def test_only_files_of_the_job_are_pushed(client, hub, job_id, tmp_path):
    (tmp_path / "rocket").mkdir()
    (tmp_path / "rocket" / "diary.txt").write_text("mine")

    pushed = push_export(client, job_id, Destination(repository=REPO), folder=tmp_path)

    assert {file.artifact.name for file in pushed.files} == {f"rocket/{name}" for name in FACTORED}
    assert hub.files(REPO) == FACTORED


def test_export_branch_message_and_folder_can_be_chosen(remote, hub, job_id, tmp_path):
    options = ("--export", "dense", "--revision", "v2/a", "--message", "mine", "--folder", tmp_path / "here")
    outcome = remote("push", job_id, REPO, *options)

    assert outcome.out == f"{hub.url}/{REPO}/tree/v2/a\n"
    assert hub.files(REPO, "v2/a") == {"model.safetensors": WEIGHTS * 2}
    assert (hub.files(REPO), hub.messages) == ({}, ["mine"])
    assert (tmp_path / "here" / "dense" / "model.safetensors").exists()
    assert not default_folder(job_id).exists()


def test_the_dense_export_is_pushed_if_there_is_no_other(remote, hub, service):
    assert remote("push", service.succeeded({"dense/config.json": b"{}"}), REPO).code == 0
    assert hub.files(REPO) == {"config.json": b"{}"}


def test_json_output_describes_the_pushed_revision(remote, hub, job_id):
    told = json.loads(remote("push", job_id, "small", "--json").out)

    assert (told["repository"], told["revision"], told["export"], told["is_new"]) == (REPO, "main", "rocket", True)
    assert len(told["commit"]) == 40
    assert {file["name"] for file in told["files"]} == {f"rocket/{name}" for name in FACTORED}


def test_a_private_push_creates_a_private_repository(remote, hub, job_id):
    assert remote("push", job_id, REPO, "--private").code == 0
    assert hub.private == {REPO}
    assert remote("push", job_id, REPO, "--private").code == 0


def test_a_private_push_to_a_public_repository_is_refused(remote, hub, job_id):
    remote("push", job_id, REPO, "--export", "dense")

    outcome = remote("push", job_id, REPO, "--private", "--json")

    assert outcome.code == 8
    assert json.loads(outcome.out)["error"]["code"] == "repository_is_public"
    assert hub.commits(REPO) == 1


def test_the_token_comes_from_the_named_variable_and_is_hidden(remote, hub, job_id, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    monkeypatch.setenv("MINE", TOKEN)

    outcome = remote("push", job_id, REPO, "--hub-token-env", "MINE", "--json")
    assert outcome.code == 0
    assert TOKEN not in outcome.out + outcome.err
    wrong = remote("push", job_id, REPO, "--json")
    assert wrong.code == 77
    assert json.loads(wrong.out)["error"]["code"] == "hub_token_invalid"
    assert "hf_other" not in wrong.out + wrong.err
    instead = remote("push", job_id, REPO, "--hub-token-env", TOKEN)
    assert instead.code == 2
    assert TOKEN not in instead.out + instead.err


def test_without_a_token_no_request_is_sent(remote, hub, job_id, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))

    outcome = remote("push", job_id, REPO)

    assert outcome.code == 77
    assert "HF_TOKEN" in outcome.err
    assert hub.asked == []


def test_an_unwritable_repository_is_refused_before_downloading(remote, hub, job_id):
    outcome = remote("push", job_id, "bob/small")

    assert outcome.code == 77
    assert "may not write to bob/small" in outcome.err
    assert not default_folder(job_id).exists()


@pytest.mark.parametrize("name", ["a/b/c", "a b", "--x--", "", "a/..", "https://huggingface.co/a/b"])
def test_an_invalid_repository_name_is_refused(client, hub, job_id, name):
    from rocket_client.errors import InvalidArgumentError

    with pytest.raises(InvalidArgumentError, match="NAMESPACE/NAME"):
        push_export(client, job_id, Destination(repository=name))
    assert hub.asked == []


def test_an_unreachable_hub_is_a_temporary_failure(remote, hub, job_id, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")

    outcome = remote("push", job_id, REPO)

    assert outcome.code == 75
    assert "the Hub does not answer" in outcome.err
    assert "Traceback" not in outcome.err


def test_hub_offline_mode_is_a_temporary_failure(remote, hub, job_id, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    assert remote("push", job_id, REPO).code == 75


@pytest.mark.parametrize(("status", "code"), [(503, 75), (429, 75), (409, 75), (400, 2), (403, 77)])
def test_refusals_of_the_hub_become_exit_codes(remote, hub, job_id, status, code):
    hub.refusals["POST", f"/api/models/{REPO}/commit/"] = (status, "because")

    outcome = remote("push", job_id, REPO)

    assert outcome.code == code
    assert "because" in outcome.err


def test_missing_results_cannot_be_pushed(remote, hub, service, job_id):
    assert remote("push", service.submit(), REPO).code == 8
    assert remote("push", "job_" + "0" * 26, REPO).code == 7
    assert remote("push", "../x", REPO).code == 2
    only_dense = service.succeeded({"dense/config.json": b"{}"})
    outcome = remote("push", only_dense, REPO, "--export", "rocket")
    assert (outcome.code, "it has dense" in outcome.err) == (8, True)
    assert hub.repositories == {}


def test_an_interrupted_push_resumes_at_the_next_call(server, hub, job_id, tmp_path):
    # In a separate process, which gets the signal during an upload to the Hub.
    code = (
        "import huggingface_hub._commit_api as c; c.is_xet_available = lambda: False\n"
        "from rocket_cli.main import main; main()"
    )
    command = [sys.executable, "-c", code, "push", job_id, REPO, "--server", server.url]
    environment = os.environ | {"HF_ENDPOINT": hub.url}
    hub.hold(f"/api/models/{REPO}/commit/")
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: hub.held)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=180)
    hub.let_go()
    assert process.returncode == 130
    assert "Traceback" not in told
    assert hub.commits(REPO) == 0

    subprocess.run(command, env=environment, check=True, timeout=180)
    assert hub.files(REPO) == FACTORED
    assert len(hub.received) == 2
