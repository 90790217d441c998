"""Jobs whose processes are forked from one that has imported the library."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading

import psutil
import pytest

from tests.e2e.service_process import command_line, runs
from tests.reference.fake_hub import FakeHub
from tests.reference.tiny_models import save_tiny_model
from tests.worker.waiting import PATIENCE, eventually
from worker.processes.job_processes import FreshJobs, JobStart, WarmJobs
from worker.runner import ALL_ROUND, Runner, job_environment

pytestmark = pytest.mark.skipif(not WarmJobs.is_supported(), reason="this system cannot fork such processes")

CANARY = "canary-0123456789"
KEY = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
CALIBRATION = {"samples": 2, "sequence_length": 16}
# Two layers, and few steps.
QUICK = {
    "calibration": CALIBRATION,
    "options": {"preset": "paper", "ignore": ["*.mlp.*", "*.k_proj", "*.v_proj", "*.o_proj"]},
}
# Imported by every interpreter that is started with it on PYTHONPATH; replaces what reads the model.
CURIOUS = """
import json, os
import worker.confined.computation

def look(self):
    request = self._request
    found = dict(os.environ), os.getcwd(), os.getsid(0), [os.readlink(f"/proc/self/fd/{n}") for n in (0, 1, 2)]
    (request.output / "found.json").write_text(json.dumps(found))
    try:
        (request.output.parent / "job.txt").write_text("x")
    except OSError as error:
        (request.output / "refused.json").write_text(json.dumps(type(error).__name__))
    os.kill(os.getpid(), 9)

worker.confined.computation.Computation._work = look
"""


@pytest.fixture(scope="module")
def template_kept():
    """Processes forked from one template, as its start takes longer than most tests."""
    jobs = WarmJobs(os.environ)
    # Before any test, each of which ends the processes that it has started.
    jobs.prepare()
    yield jobs
    jobs.close()


@pytest.fixture
def warm_kept(template_kept, settings, database):
    """A runner whose jobs are forked, with the template of other tests."""
    runner = Runner(settings, database, processes=template_kept)
    runner.prepare()
    return runner


@pytest.fixture
def warm(configure, database):
    """A runner whose jobs are forked, with its own template."""
    runners = []

    def warm(**changes):
        settings = configure(**changes)
        runner = Runner(settings, database, processes=WarmJobs(job_environment(settings, ALL_ROUND)))
        runners.append(runner)
        runner.prepare()
        return runner

    yield warm
    for runner in runners:
        runner.close()


def family(process=None):
    return (process or psutil.Process()).children(recursive=True)


def named(module):
    return [process for process in family() if runs(process, module)]


def template():
    """Return the template that was started last."""
    found = [process for process in psutil.Process().children() if "worker.attempt.warm_job:run" in process.cmdline()]
    return max(found, key=psutil.Process.create_time)


def test_warm_jobs_produce_the_bytes_of_fresh_ones(warm_kept, settings, database, submit, model, look, published):
    first, second, third = (submit(**QUICK) for _ in range(3))
    assert warm_kept.run(first)
    pid = template().pid
    assert warm_kept.run(second)
    assert template().pid == pid
    assert Runner(settings, database).run(third)
    assert [look(job).status for job in (first, second, third)] == ["succeeded"] * 3
    hashes = [
        {name: file for name, file in published(job).items() if name.endswith(".safetensors")}
        for job in (first, second, third)
    ]
    assert hashes[0]
    assert hashes[0] == hashes[1] == hashes[2]


def test_what_waits_holds_no_secret_and_no_thread_until_closed(warm):
    runner = warm(secret_key=KEY)
    eventually(lambda: len(family(template())) == 3)
    waiting = [template(), *family(template())]
    for process in waiting:
        assert process.num_threads() == 1
        assert not [name for name in process.environ() if name.startswith("ROCKET_")]
    [home] = {process.environ()["HOME"] for process in waiting}
    assert os.path.lexists(home)
    runner.close()
    assert psutil.wait_procs(waiting, timeout=10)[1] == []
    assert not os.path.lexists(home)


def test_a_forked_process_is_confined_like_a_fresh_one(warm, submit, model, look, tmp_path, monkeypatch, settings):
    (tmp_path / "curious").mkdir()
    (tmp_path / "curious" / "sitecustomize.py").write_text(CURIOUS)
    monkeypatch.syspath_prepend(tmp_path / "curious")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    job = submit(max_attempts=1, calibration=CALIBRATION)
    assert warm(hf_token=CANARY).run(job)
    assert look(job).status == "failed"
    work = settings.data_dir / "work" / look(job).work_key
    environment, folder, session, standard = json.loads((work / "out" / "found.json").read_text())
    assert CANARY not in str(environment)
    assert folder == str(work / "empty")
    assert session != os.getsid(0)
    assert standard[0] == "/dev/null"
    assert all(name.startswith("pipe:") for name in standard[1:])
    assert json.loads((work / "out" / "refused.json").read_text()) == "PermissionError"
    assert not (work / "job.txt").exists()


def test_models_of_the_hub_are_cached_for_all_jobs(warm, submit, look, tmp_path, monkeypatch):
    folder = save_tiny_model("llama", tmp_path / "published")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    with FakeHub() as hub:
        hub.repositories["org/model"] = {file.name: file.read_bytes() for file in folder.iterdir()}
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        job = submit(model_id="org/model", **QUICK)
        assert warm().run(job)
    assert (look(job).status, look(job).error) == ("succeeded", None)
    assert [path.name for path in (tmp_path / "cache" / "hub").glob("models--*")] == ["models--org--model"]


def test_each_job_has_its_own_home(warm_kept, submit, model, settings, look):
    job = submit(calibration=CALIBRATION)
    thread = threading.Thread(target=warm_kept.run, args=(job,), daemon=True)
    thread.start()
    eventually(lambda: named("worker.confined.compute"))
    [computing] = named("worker.confined.compute")
    assert job in command_line(computing)
    home = computing.environ()["HOME"]
    assert os.path.realpath(home) == str((settings.data_dir / "work" / look(job).work_key / "home").resolve())
    thread.join(PATIENCE)


def test_cancelling_stops_a_forked_job(configure, database, template_kept, submit, model, look, cancel):
    runner = Runner(configure(cancel_grace_seconds=60), database, processes=template_kept)
    job = submit(calibration=CALIBRATION)
    thread = threading.Thread(target=runner.run, args=(job,), daemon=True)
    thread.start()
    eventually(lambda: look(job).stage == "calibrating")
    cancel(job)
    thread.join(PATIENCE)
    assert (look(job).status, look(job).error) == ("cancelled", None)
    assert named("worker.attempt.job") == named("worker.confined.compute") == []


@pytest.mark.soak
def test_a_job_outlives_the_loss_of_its_template(warm, submit, model, look):
    runner = warm()
    job = submit(calibration=CALIBRATION)
    thread = threading.Thread(target=runner.run, args=(job,), daemon=True)
    thread.start()
    eventually(lambda: named("worker.confined.compute"))
    lost = family(template())
    template().kill()
    thread.join(PATIENCE)
    assert psutil.wait_procs(lost, timeout=10)[1] == []
    assert (look(job).status, look(job).attempt) == ("queued", 1)
    assert runner.run(job)
    assert (look(job).status, look(job).attempt) == ("succeeded", 2)


def test_killing_a_forked_job_ends_its_processes(warm_kept, submit, model, look):
    job = submit(calibration=CALIBRATION)
    thread = threading.Thread(target=warm_kept.run, args=(job,), daemon=True)
    thread.start()
    eventually(lambda: named("worker.confined.compute"))
    [process] = named("worker.attempt.job")
    below = family(process)
    process.kill()
    thread.join(PATIENCE)
    assert psutil.wait_procs(below, timeout=10)[1] == []
    assert (look(job).status, look(job).attempt) == ("queued", 1)


def test_a_template_that_cannot_start_is_not_needed(tmp_path, caplog):
    jobs = WarmJobs({"PATH": os.environ["PATH"]})
    missing = str(tmp_path / "python")
    executable, sys.executable = sys.executable, missing
    try:
        jobs.prepare()
    finally:
        sys.executable = executable
    assert "the next job starts more slowly" in caplog.text
    assert jobs.is_ready()
    start = JobStart(arguments=("job_0", "fence"), folder=tmp_path, environment=dict(os.environ))
    process = FreshJobs(("-c", "pass")).start(start)
    assert process.wait() == 0
    jobs.close()


def test_spares_that_cannot_be_forked_are_not_needed(tmp_path):
    code = """
        import os, resource
        from app.shared.confinement import Sandbox
        from worker.processes.children import COMPUTE_PROGRAM
        from worker.processes.spares import Spares

        # The kernel limits no processes of root.
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        spares = Spares(2, unneeded=())
        try:
            spares(COMPUTE_PROGRAM, {}, "job_0", Sandbox())
        except BlockingIOError as error:
            print("no program either:", error.strerror)
    """
    environment = {name: str(tmp_path) for name in ("HF_HOME", "HF_HUB_CACHE", "HOME", "TMPDIR")}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    assert "no program either: Resource temporarily unavailable" in done.stdout
    assert "no process can be forked in advance" in done.stderr


def test_killing_a_worker_ends_its_template():
    code = (
        "import time; from worker.processes.job_processes import WarmJobs; w = WarmJobs({}); w.prepare(); "
        "print('on', flush=1); time.sleep(60)"
    )
    process = psutil.Popen([sys.executable, "-c", code], stdout=-1)
    try:
        process.stdout.readline()
        eventually(lambda: len(process.children(recursive=True)) == 4)
        below = process.children(recursive=True)
        [home] = {child.environ()["HOME"] for child in below}
        assert os.path.lexists(home)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert psutil.wait_procs(below, timeout=10)[1] == []
    assert not os.path.lexists(home)
