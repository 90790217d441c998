"""Jobs that bubblewrap confines."""

import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from app.shared.confinement import Sandbox, bubblewrap_command, bubblewrap_fault
from tests.e2e.service_process import Service, command_line, runs
from tests.reference.fake_hub import FakeHub
from tests.reference.tiny_models import save_tiny_model

pytestmark = pytest.mark.system

REQUEST = {"model_id": "local/tiny", "ratio": 0.3, "calibration": {"samples": 2, "sequence_length": 16}}
CURIOUS = """
import glob, os, socket
print(glob.glob("/proc/[0-9]*"))
print(os.path.exists("/etc/shadow"), os.path.exists({secret!r}), os.listdir("/dev/shm"))
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=5)
except OSError as error:
    print(type(error).__name__)
open({own!r} + "/new", "w").write("written")
"""


@pytest.fixture
def service(tmp_path):
    save_tiny_model("llama", tmp_path / "data" / "models" / "tiny")
    service = Service(tmp_path / "data", ROCKET_ISOLATION="bubblewrap")
    yield service
    service.close()


def test_bubblewrap_works_here():
    assert bubblewrap_fault() is None


def test_a_process_sees_no_other_process_file_or_server(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (tmp_path / "secret").write_text("secret")
    reader, writer = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = CURIOUS.format(secret=str(tmp_path / "secret"), port=server.getsockname()[1], own=str(own))
        command = bubblewrap_command(Sandbox(writable=(own,)), folder=own, info=writer)
        result = subprocess.run(
            [*command, sys.executable, "-c", code], pass_fds=(writer,), capture_output=True, text=True, check=False
        )
    os.close(reader)
    os.close(writer)
    assert result.stdout.splitlines() == ["['/proc/1']", "False False []", "ConnectionRefusedError"], result.stderr
    assert (own / "new").read_text() == "written"


def test_a_job_succeeds_and_its_processes_are_wrapped(service):
    job_id = service.submit(**REQUEST)
    wrapped = []
    while service.job(job_id)["status"] in {"queued", "running"}:
        wrapped += [process for process in service.descendants() if "--as-pid-1" in command_line(process)]
        time.sleep(0.1)
    assert service.job(job_id)["status"] == "succeeded", service.log.read_text()[-3000:]
    assert wrapped
    assert "jobs are confined by bubblewrap" in service.log.read_text()


def test_a_model_of_the_hub_is_downloaded_and_compressed(tmp_path):
    folder = save_tiny_model("llama", tmp_path / "published")
    with FakeHub() as hub:
        hub.repositories["org/model"] = {file.name: file.read_bytes() for file in folder.iterdir()}
        settings = {"ROCKET_ISOLATION": "bubblewrap", "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache")}
        service = Service(tmp_path / "data", **settings)
        try:
            job = service.finished(service.submit(**REQUEST | {"model_id": "org/model"}))
        finally:
            service.close()
    assert job["status"] == "succeeded", job["error"]


def test_a_cancelled_job_leaves_no_process(service):
    job_id = service.submit(**REQUEST | {"calibration": {"samples": 4096, "sequence_length": 64}})
    service.wait(job_id, until=lambda job: job["stage"] == "calibrating")
    processes = [child for child in service.descendants() if runs(child, "worker.confined.compute")]
    assert processes
    service.client.post(f"/jobs/{job_id}/cancel").raise_for_status()
    assert service.finished(job_id)["status"] == "cancelled"
    _ended, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []
