"""API and workers in separate processes, with Redis between them; each worker has its own disk."""

import os
import signal
import subprocess
import time

import httpx2
import psutil
import pytest

from tests.e2e.service_process import QUICK, ROCKET, runs
from tests.e2e.watching import LAYERS
from tests.servers import Redis

REQUEST = {"model_id": "local/tiny-llama", "ratio": 0.3, "calibration": {"samples": 8, "sequence_length": 128}}


class Stack:
    """Commands that share only a database, a broker and the models."""

    def __init__(self, folder, model, broker_url):
        self.folder = folder
        (folder / "models").mkdir()
        (folder / "models" / "tiny-llama").symlink_to(model)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROCKET_", "HF_TOKEN"))}
        shared = {
            "ROCKET_DATABASE_URL": f"sqlite:///{folder}/shared.sqlite3",
            "ROCKET_BROKER_URL": broker_url,
            "ROCKET_MODELS_DIR": str(folder / "models"),
            "ROCKET_LEASE_SECONDS": "3",
        }
        self._environment = kept | QUICK | shared
        self._started = []

    def run(self, *arguments):
        environment = self._environment | {"ROCKET_DATA_DIR": str(self.folder / "operator")}
        return subprocess.run(
            [ROCKET, *arguments], env=environment, capture_output=True, text=True, timeout=180, check=False
        )

    def start(self, data, *arguments):
        """Start a command with a data folder; return the process and its first line."""
        environment = self._environment | {"ROCKET_DATA_DIR": str(self.folder / data)}
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen([ROCKET, *arguments], env=environment, stdout=subprocess.PIPE, stderr=log)
        self._started.append(process)
        return process, process.stdout.readline().decode().strip()

    def log(self):
        return (self.folder / "log").read_text()[-3000:]

    def close(self):
        for process in self._started:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture
def stack(tmp_path, small_model):
    redis = Redis()
    stack = Stack(tmp_path, small_model, redis.url)
    yield stack
    stack.close()
    redis.close()


def test_job_moved_between_workers_produces_identical_bytes(stack):
    for command in (["api", "--port", "0"], ["worker"], ["migrate", "--check"]):
        refused = stack.run(*command)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "rocket migrate" in refused.stderr
    assert stack.run("migrate").returncode == 0
    _, told = stack.start("api", "api", "--port", "0")
    assert told.startswith("Serving on http://127.0.0.1:"), stack.log()
    with httpx2.Client(base_url=told.removeprefix("Serving on "), timeout=180) as client:

        def wait(job_id, until):
            deadline = time.monotonic() + 180
            while not until(job := client.get(f"/jobs/{job_id}").raise_for_status().json()):
                assert time.monotonic() < deadline, (job, stack.log())
                time.sleep(0.02)
            return job

        def events(job_id, after):
            return client.get(f"/jobs/{job_id}/events", params={"after": after, "limit": 100}).json()["data"]

        def hashes(job_id):
            files = client.get(f"/jobs/{job_id}/artifacts").json()["data"]
            told = ("report.json", "report.html", ".md")
            return {file["name"]: file["sha256"] for file in files if not file["name"].endswith(told)}

        first, told = stack.start("a", "worker", "--queue", "cpu")
        assert told.startswith("Working on queue cpu (device cpu"), stack.log()
        assert told.endswith(f":{first.pid}")
        job_id = client.post("/jobs", json=REQUEST).raise_for_status().json()["id"]
        wait(job_id, lambda job: events(job_id, 10))
        # The attempt's process, which is in between, hides its environment.
        [computing] = [
            child
            for child in psutil.Process(first.pid).children(recursive=True)
            if runs(child, "worker.confined.compute")
        ]
        assert computing.environ()["CUDA_VISIBLE_DEVICES"] == ""
        # Killed; the next has another disk, and finds no checkpoint on it.
        first.kill()
        first.wait()
        second, _ = stack.start("b", "worker", "--queue", "cpu")
        wait(job_id, lambda job: job["attempt"] == 2 and list((stack.folder / "b" / "work").glob("*/out/*/profiles/*")))
        # Told to stop, and releases its job in order.
        began = time.monotonic()
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) == 0, stack.log()
        assert time.monotonic() - began < 20
        released = client.get(f"/jobs/{job_id}").json()
        assert (released["status"], released["attempt"]) == ("queued", 1)
        stack.start("b", "worker")
        job = wait(job_id, lambda job: job["status"] not in {"queued", "running"})
        assert (job["status"], job["attempt"], job["queue"]) == ("succeeded", 2, "cpu"), (job, stack.log())
        told = [event for after in range(0, 300, 100) for event in events(job_id, after)]
        assert [event["id"] for event in told] == list(range(1, len(told) + 1))
        profiled = [event["data"]["layer"] for event in told if event["type"] == "layer"]
        assert len(profiled) == len(set(profiled)) == LAYERS
        assert job["expires_at"] == client.get(f"/jobs/{job_id}/artifacts").json()["data"][0]["expires_at"]
        other = client.post("/jobs", json=REQUEST).raise_for_status().json()["id"]
        wait(other, lambda job: job["status"] == "succeeded")
        assert hashes(job_id) == hashes(other)
