"""The log of a real service, with a stand-in for the compression itself: one id finds all lines of a job."""

import json
import subprocess
import sys
import textwrap
from collections import defaultdict

import pytest

from tests.e2e.service_process import QUICK
from tests.worker.waiting import eventually

# `rocket serve`, whose jobs run a program of the test.
SERVICE = """
import functools, sys
import worker.main
worker.main.Worker = functools.partial(worker.main.Worker, program=(sys.argv[1],))
from rocket_cli.main import main
main(["serve", "--port", "0", "--data-dir", sys.argv[2]])
"""
# The process of an attempt, unchanged except for the program of its compute process.
JOB = """
import sys
from worker.attempt import delegation
from worker.attempt import job
delegation.COMPUTE_PROGRAM = (sys.argv[0].replace("job.py", "compute.py"),)
sys.exit(job.main())
"""
# That process, except that a module which logs and fails in all ways replaces the library.
COMPUTE = """
import logging, sys, threading, types, warnings

library = types.ModuleType("rocket_core.pipeline")
noisy = logging.getLogger("transformers")
noisy.addHandler(logging.StreamHandler())
noisy.propagate = False

def compress(model, output, config, *, observer, **options):
    warnings.warn("a warning of a library")
    noisy.warning("a line of a library that has a handler of its own")
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    observer.on_progress(types.SimpleNamespace(stage="calibrating", layer=None, fraction=0.5, seconds_left=None))
    raise ValueError("two\\nlines")

library.compress = compress
library.Observer = library.Progress = object
library.ProfileCache = lambda folder, quota_bytes: None
sys.modules["rocket_core.pipeline"] = library
from worker.confined.compute import main
main()
"""


@pytest.fixture
def lines(start_service, tmp_path, monkeypatch):
    """Return what a service and the process of one job have logged, each line as JSON, and the job's id."""
    for name, code in (("service.py", SERVICE), ("job.py", JOB), ("compute.py", COMPUTE)):
        (tmp_path / name).write_text(textwrap.dedent(code), encoding="utf-8")
    program = [sys.executable, str(tmp_path / "service.py"), str(tmp_path / "job.py")]
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen([*program, command[-1]], **options))
    service = start_service(ROCKET_LOG_FORMAT="json", ROCKET_LOG_LEVEL="info", **QUICK)
    monkeypatch.undo()
    body = {"model_id": "local/tiny-llama", "ratio": 0.3}
    answer = service.client.post("/jobs", json=body, headers={"X-Request-Id": "the-request-1"})
    job_id = answer.json()["id"]
    assert service.finished(job_id)["error"]["code"] == "internal_error"
    service.client.get("/nowhere")
    eventually(lambda: '"ended"' in service.log.read_text())

    def metrics():
        return service.client.get("/metrics").raise_for_status().text

    # The worker of this process counts where its API tells, a moment after the process of the job has ended.
    eventually(lambda: 'rocket_attempts_ended_total{outcome="failed"} 1.0' in metrics())
    assert 'rocket_http_requests_total{method="POST",route="/jobs",status="202"} 1.0' in metrics()
    assert service.stop() == 0
    return [json.loads(line) for line in service.log.read_text().splitlines()], job_id


def test_every_log_line_is_json_with_job_and_request_ids(lines):
    lines, job_id = lines
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    by_message = defaultdict(list)
    for line in lines:
        by_message[line["message"].splitlines()[0]].append(line)
    story = [line["message"].splitlines()[0] for line in lines if line.get("request_id") == "the-request-1"]
    # Web side, supervisor, child, in this order; the request's line may come before or after the worker has started.
    assert [message for message in story if message != "request"] == [
        "accepted",
        "started",
        next(message for message in story if "UserWarning" in message),
        "a line of a library that has a handler of its own",
        "a thread ends because of an error",
        "unexpected error",
        "ended",
    ]
    for message in set(story) - {"request"}:
        assert {line["job_id"] for line in by_message[message]} == {job_id}, message
    [submitted] = [line for line in by_message["request"] if line["request_id"] == "the-request-1"]
    assert (submitted["method"], submitted["route"], submitted["status"]) == ("POST", "/jobs", 202)
    looks = [line for line in by_message["request"] if line["route"] == "/jobs/{job_id}"]
    assert {line["job_id"] for line in looks} == {job_id}
    assert "job_id" not in next(line for line in by_message["request"] if line["route"] is None)
    assert "ValueError: two\nlines" in by_message["unexpected error"][0]["trace"]
    # The server's own lines are logged in the same way.
    assert {"uvicorn.error", "app.api.middleware.requests", "worker.runner"} <= {line["logger"] for line in lines}
