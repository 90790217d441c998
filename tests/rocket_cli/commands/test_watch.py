import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest

from app.shared.outcomes import JobError
from rocket_cli.following import JobView, seconds_until
from rocket_client.models import Event, Progress
from tests.loopback_service import ServerProcess, in_background, wait_for
from tests.rocket_cli.fakes import REGRESSED

WATCH = "from rocket_cli.main import main; main()"


class Recorder:
    def __init__(self):
        self.shown = []

    def show(self, *state):
        self.shown.append(state)


def event(kind, level="info", **data):
    return Event(id=1, created_at=datetime.now(UTC), level=level, type=kind, message="told", data=data)


def progress(status, stage, fraction):
    return Progress(status=status, stage=stage, progress=fraction)


def watching(server, job_id, *options, **streams):
    command = [sys.executable, "-c", WATCH, "watch", job_id, "--server", server.url, *options]
    return subprocess.Popen(command, **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | streams))


def test_stage_layer_and_progress_are_combined(capsys):
    recorder = Recorder()
    view = JobView(recorder)
    for news in (
        progress("queued", None, 0),
        progress("running", "calibrating", 0.1),
        event("layer", layer="model.layers.0.q"),
        event("message", level="warning"),
        progress("running", "calibrating", 0.2),
        progress("running", "factorizing", 0.8),
        progress("cancelling", "factorizing", 0.8),
    ):
        view.show(news)

    assert recorder.shown == [
        ("queued", "", 0, None),
        ("calibrating", "", 0.1, None),
        ("calibrating", "model.layers.0.q", 0.2, None),
        ("factorizing", "", 0.8, None),
        ("cancelling", "", 0.8, None),
    ]
    assert capsys.readouterr().err == "rocket: warning: told\n"


def test_time_left_is_never_negative():
    assert seconds_until(None) is None
    assert seconds_until(datetime.now(UTC) - timedelta(hours=1)) == 0
    assert 3590 < seconds_until(datetime.now(UTC) + timedelta(hours=1)) <= 3600


def test_a_job_that_has_succeeded_is_shown_at_once(remote, service):
    job_id = service.succeeded({})

    outcome = remote("watch", job_id)

    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"{job_id} succeeded in ")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (JobError(code="insufficient_disk", message="the disk is full", stage="exporting"), 5),
        (JobError(code="internal_error", message="the disk is full", stage="exporting"), 1),
        (JobError(code="infeasible_budget", message="the disk is full", stage="exporting"), 4),
    ],
)
def test_a_failed_job_shows_its_error_and_sets_the_exit_code(remote, service, error, code):
    job_id = service.submit()
    service.fail(service.claim(job_id), error)

    outcome = remote("watch", job_id)

    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err == f"rocket: error: {job_id} failed while writing the files: the disk is full\n"


@pytest.mark.parametrize(
    ("bounds", "outcome", "code"),
    [
        ({"evaluate": {}, "accept": {"max_kl": 0.05}}, "regressed", 10),
        ({"evaluate": {}, "accept": {"max_kl": 0.05}}, "anomalous", 10),
        ({"evaluate": {}, "accept": {"max_kl": 0.05}}, "accepted", 0),
        # An export of such a job, whose files have its report.
        ({}, "regressed", 0),
    ],
)
def test_a_result_that_is_not_accepted_sets_the_exit_code(remote, service, bounds, outcome, code):
    job_id = service.submit(**bounds)
    service.succeed(service.claim(job_id), {}, verdict=REGRESSED.model_copy(update={"outcome": outcome}))

    shown, as_json = remote("watch", job_id), remote("watch", job_id, "--json")

    assert [(shown.code, shown.err), (as_json.code, as_json.err)] == [(code, "")] * 2
    assert f"Verdict: {outcome}: KL divergence 0.5 nats per token, at most 0.05 accepted\n" in shown.out
    assert json.loads(as_json.out)["result"]["verdict"]["outcome"] == outcome
    assert f"10 → 10.2, {outcome}" in remote("jobs").out


def test_a_cancelled_job_sets_the_exit_code(remote, client, service):
    job_id = service.submit()
    client.cancel(job_id)

    outcome = remote("watch", job_id)

    assert outcome.code == 9
    assert outcome.err == (f"rocket: {job_id} is cancelled; `rocket retry {job_id}` resumes from its checkpoints\n")


def test_json_output_is_the_finished_job_with_its_error(remote, client, service):
    job_id = service.submit()
    service.fail(service.claim(job_id))

    outcome = remote("watch", job_id, "--json")

    assert outcome.code == 6
    assert json.loads(outcome.out) == client.get_job(job_id).model_dump(mode="json")
    assert json.loads(outcome.out)["error"]["code"] == "corrupt_checkpoint"


def test_a_log_has_a_line_for_each_stage_and_warning(remote, server, service):
    job_id = service.submit()
    lease = service.claim(job_id)
    service.warn(lease, "few samples")
    steps = [
        lambda: wait_for(lambda: server.application.state.streams._slots._taken),
        lambda: service.progress(lease, "calibrating", 0.25, datetime.now(UTC) + timedelta(seconds=110)),
        lambda: time.sleep(0.3),
        lambda: service.succeed(lease, {}),
    ]
    with in_background(*steps):
        outcome = remote("watch", job_id)

    assert outcome.code == 0
    # Seconds may pass until it is told.
    assert re.sub(r"1:[0-5]\d left", "1:50 left", outcome.err).splitlines() == [
        "rocket: 0%: running",
        "rocket: warning: few samples",
        "rocket: 25%, 1:50 left: profiling the layers",
        "rocket: 100%: succeeded",
    ]


def test_an_unknown_job_is_answered_with_a_similar_one(remote, service):
    job_id = service.submit()

    outcome = remote("watch", job_id[:-1] + "_")

    assert outcome.code == 7
    assert f"did you mean {job_id}?" in outcome.err
    assert "`rocket jobs` lists" in outcome.err


def test_a_path_is_not_a_job(remote):
    assert remote("watch", "../healthz").code == 2


def test_ctrl_c_leaves_the_job_running_and_shows_how_to_resume(server, service, client):
    job_id = service.submit()
    with watching(server, job_id) as process:
        while "queued" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=180)

    assert (process.returncode, out) == (130, "")
    assert f"{job_id} continues" in err
    assert f"rocket watch {job_id} --server {server.url}" in err
    assert f"rocket cancel {job_id} --server {server.url}" in err
    assert "Traceback" not in err
    assert client.get_job(job_id).status == "queued"


def test_watching_survives_a_restart_of_the_server(service):
    job_id = service.submit()
    lease = service.claim(job_id)
    with ServerProcess(service.settings.data_dir) as server, watching(server, job_id) as process:
        while "running" not in process.stderr.readline():
            pass
        server.kill()
        gone = process.stderr.readline()
        server.start()
        service.progress(lease, "calibrating", 0.5)
        service.succeed(lease, {})
        out, err = process.communicate(timeout=180)

    assert f"{server.url} does not answer" in gone
    assert "retrying for 5 min" in gone
    assert f"{server.url} answers again" in err
    assert process.returncode == 0
    assert f"{job_id} succeeded" in out


def test_a_terminal_shows_a_bar_with_stage_layer_and_time_left(server, service):
    job_id = service.submit()
    lease = service.claim(job_id)
    finish_at = datetime.now(UTC) + timedelta(seconds=754)
    service.profile(lease, "model.layers.3.mlp.down_proj")
    service.progress(lease, "calibrating", 0.42, finish_at)
    terminal, end_of_process = pty.openpty()
    drawn = b""
    with watching(server, job_id, stderr=end_of_process) as process:
        os.close(end_of_process)
        while b"left" not in drawn or b"12:" not in drawn:
            drawn += os.read(terminal, 4096)
        service.profile(lease, "model.layers.4.mlp.up_proj", 1)
        service.progress(lease, "calibrating", 0.5, finish_at)
        while b"up_proj" not in drawn:
            drawn += os.read(terminal, 4096)
        service.succeed(lease, {})
        out = process.stdout.read()
        process.wait(timeout=180)
    os.close(terminal)

    assert b"profiling" in drawn
    assert b"42%" in drawn
    assert process.returncode == 0
    assert "succeeded" in out
