import os
import subprocess
import sys
import time

import psutil
import pytest
from sqlalchemy import text

from app.shared.database import Database
from app.shared.models import Job
from app.shared.repositories import events, leases, sweeps
from tests.worker.waiting import eventually
from worker.runner import Equipment, Runner

FOREVER = "while True: time.sleep(1)"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
# Stops at a SIGTERM as a job does: releases its job and exits in order.
POLITE = """
    import threading
    from app.shared.database import Database
    from app.shared.repositories import leases
    from app.shared.settings import load_settings
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    {note}
    while not stop.wait(0.02):
        pass
    database = Database(load_settings().database)
    with database.transaction() as session:
        leases.release_job(session, leases.Lease(job_id=sys.argv[1], fence=sys.argv[2]))
"""


@pytest.fixture
def runner(settings, database):
    def runner(program, changed=None):
        return Runner(changed or settings, database, program)

    return runner


@pytest.fixture
def told(database):
    def told(job_id, kind):
        with database.snapshot() as session:
            return [event for event in events.list_events(session, job_id) if event.type == kind]

    return told


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_without_a_job_nothing_runs(runner, program):
    assert not runner(program(FOREVER)).run()


def test_a_process_is_given_its_job_fence_and_parent(runner, program, diary, submit, look):
    job_id = submit(max_attempts=1)
    assert runner(program(diary.note("sys.argv[1:]"))).run()
    [line] = diary.read()
    told_id, fence, parent, *options = eval(line)  # noqa: S307
    assert (told_id, int(parent), options) == (job_id, os.getpid(), ["--isolation", "landlock"])
    assert len(fence) == 32


def test_one_job_runs_at_a_time(runner, program, diary, submit, in_background, look):
    first, second = submit(), submit()
    running = runner(program(diary.note("sys.argv[1]") + "\n" + FOREVER))
    thread = in_background(lambda: running.run(second))
    assert eventually(diary.read) == [second]
    assert not running.run()
    assert not running.run(first)
    assert look(first).status == "queued"
    running.stop()
    thread.join()


def test_the_oldest_job_goes_first_unless_one_is_named(runner, program, diary, submit):
    job_ids = [submit(max_attempts=1) for _ in range(3)]
    running = runner(program(diary.note("sys.argv[1]")))
    assert running.run(job_ids[2])
    assert running.run()
    assert running.run()
    assert not running.run()
    assert diary.read() == [job_ids[2], *sorted(job_ids[:2])]


def test_a_killed_process_uses_an_attempt_and_the_job_backs_off(configure, runner, program, submit, look, told):
    job_id = submit(max_attempts=2)
    settings = configure(retry_backoff_seconds=3600)
    running = runner(program("os.kill(os.getpid(), signal.SIGKILL)"), settings)
    assert running.run()
    job = look(job_id)
    assert (job.status, job.attempt, job.fence) == ("queued", 1, None)
    assert 3590 < (job.available_at - job.started_at).total_seconds() < 3700
    [error] = told(job_id, "error")
    assert "memory" in error.message
    assert error.data["code"] == "worker_lost"
    assert not running.run()


def test_a_job_that_kills_its_process_fails_and_the_next_runs(runner, program, diary, submit, look):
    poison, innocent = submit(max_attempts=3), submit(max_attempts=1)
    running = runner(program(diary.note("sys.argv[1]") + "\nos.kill(os.getpid(), signal.SIGKILL)"))
    while running.run():
        pass
    assert diary.read() == [poison] * 3 + [innocent]
    job = look(poison)
    assert (job.status, job.attempt, job.error["code"], job.error["retryable"]) == ("failed", 3, "worker_lost", True)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import ctypes\nctypes.string_at(0)", "Segmentation fault"),
        # An exit code without a name, if there is one.
        ("os.kill(os.getpid(), getattr(signal, 'SIGRTMIN', signal.SIGSEGV - 1) + 1)", "crashed"),
        ("sys.exit(3)", "exit code 3"),
        ("sys.exit(0)", "exit code 0"),
        ("raise ValueError", "exit code 1"),
        ("sys.exit(76)", "exit code 76"),
    ],
)
def test_a_process_that_ends_silently_fails_its_attempt(runner, program, submit, look, code, words):
    job_id = submit(max_attempts=1)
    assert runner(program(code)).run()
    job = look(job_id)
    assert (job.status, job.error["code"]) == ("failed", "worker_lost")
    assert words in job.error["message"]


def test_a_process_that_cannot_start_fails_the_attempt(runner, settings, submit, look):
    job_id = submit(max_attempts=1)
    running = runner(("-c", "pass"))
    (settings.data_dir / "work").rmdir()
    assert running.run()
    assert look(job_id).error["code"] == "worker_lost"


def test_a_cancelled_job_is_asked_to_stop(runner, program, diary, submit, look, cancel, in_background):
    job_id = submit()
    thread = in_background(runner(program(POLITE.format(note=diary.note("'ready'")))).run)
    eventually(diary.read)
    cancel(job_id)
    thread.join()
    assert look(job_id).status == "cancelled"


def test_a_process_that_ignores_a_cancellation_is_killed(
    configure, runner, program, diary, submit, look, cancel, in_background
):
    job_id = submit()
    code = f"{STUBBORN}\n{diary.note('os.getpid()')}\n{FOREVER}"
    thread = in_background(runner(program(code), configure(cancel_grace_seconds=0.5)).run)
    [pid] = eventually(diary.read)
    cancel(job_id)
    thread.join()
    assert look(job_id).status == "cancelled"
    assert not is_alive(int(pid))


def test_a_process_stopped_before_its_handlers_releases_its_job(runner, program, diary, submit, look, in_background):
    job_id = submit()
    running = runner(program(diary.note("'early'") + "\n" + FOREVER))
    thread = in_background(running.run)
    eventually(diary.read)
    running.stop()
    thread.join()
    assert (look(job_id).status, look(job_id).attempt) == ("queued", 0)


def test_a_stopping_runner_releases_its_job_without_an_attempt(
    configure, runner, program, diary, submit, look, in_background
):
    job_id, other = submit(), submit()
    # However rarely it polls the database.
    running = runner(program(POLITE.format(note=diary.note("'ready'"))), configure(poll_seconds=60))
    thread = in_background(lambda: running.run(job_id))
    eventually(diary.read)
    running.stop()
    thread.join()
    assert (look(job_id).status, look(job_id).attempt, look(job_id).fence) == ("queued", 0, None)
    assert not running.run()
    assert not running.run(other)


def test_an_abort_does_not_wait_for_the_process(configure, runner, program, diary, submit, look, in_background):
    job_id = submit()
    code = f"{STUBBORN}\n{diary.note(1)}\n{FOREVER}"
    running = runner(program(code), configure(cancel_grace_seconds=600, poll_seconds=60))
    thread = in_background(running.run)
    eventually(diary.read)
    running.stop()
    running.abort()
    thread.join()
    assert (look(job_id).status, look(job_id).attempt) == ("queued", 0)


@pytest.mark.parametrize("fate", ["taken away", "taken by another worker", "deleted"])
def test_a_process_that_lost_its_job_is_ended(
    database, configure, runner, program, diary, submit, look, in_background, fate
):
    job_id = submit()
    # Not even a suspended process may keep its slot.
    code = f"{diary.note('os.getpid()')}\nos.kill(os.getpid(), signal.SIGSTOP)"
    thread = in_background(runner(program(code), configure(cancel_grace_seconds=0.2)).run)
    [pid] = eventually(diary.read)
    with database.transaction() as session:
        if fate == "deleted":
            session.execute(text("DELETE FROM jobs"))
        else:
            assert sweeps.reclaim_claimed(session) == [job_id]
            if fate == "taken by another worker":
                leases.claim_job(session, job_id, worker="thief", lease_seconds=60)
    thread.join()
    assert not is_alive(int(pid))
    if fate != "deleted":
        job = look(job_id)
        assert (job.status, job.attempt) == (("queued", 1) if fate == "taken away" else ("running", 2))


def test_a_database_outage_does_not_end_a_running_process(
    database, outage, runner, program, diary, submit, look, in_background, caplog
):
    job_id = submit()
    running = runner(program(POLITE.format(note=diary.note("'ready'"))))
    thread = in_background(running.run)
    eventually(diary.read)
    outage.begin(database)
    eventually(lambda: "cannot check the status" in caplog.text)
    outage.end()
    assert thread.is_alive()
    running.stop()
    thread.join()
    assert (look(job_id).status, look(job_id).attempt) == ("queued", 0)


def test_a_process_has_the_settings_and_an_empty_folder(
    configure, runner, program, diary, submit, monkeypatch, tmp_path
):
    monkeypatch.setenv("ROCKET_SERVER", "http://elsewhere")
    monkeypatch.setenv("ROCKET_LEASE_SECONDS", "3")
    submit(max_attempts=1)
    code = (
        "from app.shared.settings import load_settings\n"
        + diary.note("repr((os.environ.get('ROCKET_SERVER'), load_settings().lease_seconds))")
        + "\n"
        + diary.note("repr((os.listdir(), sys.path[0]))")
    )
    running = runner(program(code), configure(lease_seconds=7))
    monkeypatch.chdir(tmp_path)
    assert running.run()
    environment, place = map(eval, diary.read())
    assert environment == (None, 7.0)
    assert place[0] == []
    assert place[1] not in {"", str(tmp_path)}


def test_descendants_end_with_their_process(runner, program, diary, submit):
    submit(max_attempts=1)
    code = f"""
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    {diary.note("child.pid")}
    """
    assert runner(program(code)).run()
    eventually(lambda: not is_alive(int(diary.read()[0])))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the job itself looks after its parent")
def test_a_process_ends_with_the_worker(settings, submit, program, diary):
    submit()
    watched = program(
        f"{STUBBORN}\n{diary.note('os.getpid()')}\nfrom worker.processes.linux import die_with\n"
        f"die_with(int(sys.argv[3]))\n{diary.note(1)}\n{FOREVER}"
    )
    code = f"""
    from app.shared.database import Database
    from app.shared.settings import load_settings
    from worker.runner import Runner
    settings = load_settings()
    Runner(settings, Database(settings.database), {watched!r}).run()
    """
    environment = {**os.environ, **settings.environment()}
    intermediate = subprocess.Popen([sys.executable, *program(code)], env=environment)
    eventually(lambda: len(diary.read()) == 2)
    pid = int(diary.read()[0])
    assert is_alive(pid)
    intermediate.kill()
    intermediate.wait()
    eventually(lambda: not is_alive(pid), within=5)


def test_jobs_leak_no_file_descriptors(runner, program, submit):
    running = runner(program(""))
    submit(max_attempts=1)
    running.run()
    before = psutil.Process().num_fds()
    for _ in range(5):
        submit(max_attempts=1)
        assert running.run()
    assert psutil.Process().num_fds() == before


def test_a_signal_handler_may_abort_a_stopping_runner(settings, database, program):
    # In a separate process, which might hang: signals arrive at every moment of `stop`.
    code = """
    from app.shared.database import Database
    from app.shared.settings import load_settings
    from worker.runner import Runner
    settings = load_settings()
    runner = Runner(settings, Database(settings.database))
    signal.signal(signal.SIGALRM, lambda *_: runner.abort())
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        runner.stop()
    signal.setitimer(signal.ITIMER_REAL, 0)
    """
    environment = {**os.environ, **settings.environment()}
    subprocess.run([sys.executable, *program(code)], env=environment, check=True, timeout=180)


def test_several_runners_never_share_a_job(settings, submit, program, diary, in_background):
    job_ids = [submit(max_attempts=1) for _ in range(50)]
    programs = program(diary.note("sys.argv[1]"))

    def work():
        own = Database(settings.database)
        running = Runner(settings, own, programs)
        while running.run():
            pass
        own.close()

    threads = [in_background(work) for _ in range(3)]
    for thread in threads:
        thread.join()
    assert sorted(diary.read()) == sorted(job_ids)


def test_terminal_signals_do_not_reach_a_job(runner, program, diary, submit):
    submit(max_attempts=1)
    assert runner(program(diary.note("os.getsid(0) == os.getpid()"))).run()
    assert diary.read() == ["True"]


def test_a_job_of_another_queue_is_not_run(settings, database, program, diary, submit, look):
    for_gpu, for_cpu = submit(queue="gpu", max_attempts=1), submit(max_attempts=1)
    noting = program(diary.note("sys.argv[1]"))
    running = Runner(settings, database, noting, Equipment(queues=("cpu",), device="cpu"))
    assert not running.run(for_gpu)
    assert running.run()
    assert not running.run()
    assert (look(for_gpu).status, look(for_gpu).attempt) == ("queued", 0)
    assert Runner(settings, database, noting, Equipment(queues=("gpu",), device="cuda")).run()
    assert diary.read() == [for_cpu, for_gpu]


@pytest.mark.parametrize(("device", "visible"), [("cpu", ""), ("cuda", "3"), (None, "3")])
def test_a_process_is_given_its_device_and_sees_no_other(
    settings, database, program, diary, submit, monkeypatch, device, visible
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    submit(max_attempts=1)
    noting = program(diary.note("repr((sys.argv[4:], os.environ['CUDA_VISIBLE_DEVICES']))"))
    assert Runner(settings, database, noting, Equipment(device=device)).run()
    told = [*(["--device", device] if device else []), "--isolation", "landlock"]
    assert [eval(line) for line in diary.read()] == [(told, visible)]  # noqa: S307


# Writes to the database without slow imports, as the time until the first write counts too.
SQLITE = """
import sqlite3
def say(change):
    connection = sqlite3.connect({file!r}, timeout=10)
    with connection:
        connection.execute(f"UPDATE jobs SET {{change}} WHERE fence = ?", (sys.argv[2],))
    connection.close()
"""


@pytest.fixture
def speaking(settings, program):
    """Return a program that can `say` columns of its job's row."""
    return lambda code: program(SQLITE.format(file=settings.database.database) + code)


def test_a_stalled_process_is_killed_despite_its_lease_renewals(configure, runner, speaking, diary, submit, look, told):
    job_id = submit(max_attempts=2)
    renewing = "while True: say(f\"lease_until = datetime('now', '+{time.monotonic()} seconds')\"); time.sleep(0.1)"
    running = runner(speaking(f"{diary.note('os.getpid()')}\n{renewing}"), configure(stall_seconds=1))
    for attempt, status in ((1, "queued"), (2, "failed")):
        assert running.run()
        assert (look(job_id).status, look(job_id).attempt) == (status, attempt)
    assert look(job_id).error["code"] == "job_stalled"
    assert [event.data["code"] for event in told(job_id, "error")] == ["job_stalled"] * 2
    assert not any(is_alive(int(pid)) for pid in diary.read())


def test_a_suspended_process_counts_as_stalled(configure, runner, program, diary, submit, look):
    job_id = submit(max_attempts=1)
    code = f"{diary.note('os.getpid()')}\nos.kill(os.getpid(), signal.SIGSTOP)"
    assert runner(program(code), configure(stall_seconds=1, lease_seconds=60)).run()
    assert look(job_id).error["code"] == "job_stalled"
    assert not is_alive(int(diary.read()[0]))


def test_a_later_attempt_that_catches_up_is_not_stalled(configure, runner, speaking, submit, look):
    job_id = submit(max_attempts=1)
    # What an earlier attempt reached takes long to reach again: stage, progress and events stay as they are.
    working = "say(\"progressed_at = strftime('%Y-%m-%d %H:%M:%f', 'now')\")"
    code = f"for _ in range(30): {working}; time.sleep(0.1)\nsys.exit(3)"
    assert runner(speaking(code), configure(stall_seconds=1.5)).run()
    assert look(job_id).error["code"] == "worker_lost"
    assert "exit code 3" in look(job_id).error["message"]


def test_a_database_outage_is_not_a_stall(
    database, outage, configure, runner, program, diary, submit, look, in_background
):
    job_id = submit()
    running = runner(program(f"{diary.note(1)}\n{FOREVER}"), configure(stall_seconds=1))
    thread = in_background(running.run)
    eventually(diary.read)
    outage.begin(database)
    time.sleep(2)
    assert thread.is_alive()
    outage.end()
    running.stop()
    thread.join()
    assert (look(job_id).status, look(job_id).attempt) == ("queued", 0)


@pytest.fixture
def helping(configure):
    return configure(help_jobs=True)


def test_an_idle_worker_helps_with_a_job_of_another_once(helping, runner, program, diary, submit, claim, look):
    job_id = submit()
    lease = claim(job_id)
    running = runner(program(diary.note("sys.argv[1:]")), helping)

    assert running.help()
    assert not running.help()

    [line] = diary.read()
    told_id, fence, _parent, *options = eval(line)  # noqa: S307
    assert (told_id, fence) == (job_id, lease.fence)
    assert options[-2].startswith("--helper=")
    assert options[-1] == f"--worker={running.name}"
    assert look(job_id).fence == lease.fence


def test_no_worker_helps_unless_it_is_told_to(runner, program, submit, claim):
    claim(submit())
    assert not runner(program(FOREVER)).help()


def test_a_worker_does_not_help_with_work_on_artifacts(helping, runner, program, diary, submit, claim, database):
    job_id = submit()
    claim(job_id)
    with database.transaction() as session:
        options = {"heal_tokens": 1000}
        healing = {"on_source": "healing", "source_job_id": "job_" + 26 * "0", "options": options}
        request = session.get_one(Job, job_id).request | healing
        session.get_one(Job, job_id).request = request
    running = runner(program(diary.note("'started'")), helping)
    assert running.help()
    assert not running.help()
    assert diary.read() == []


@pytest.mark.parametrize("event", ["another job", "its end", "a cancellation"])
def test_a_helper_leaves_when(event, helping, runner, program, diary, submit, claim, cancel, database, in_background):
    job_id = submit()
    lease = claim(job_id)
    impatient = helping.model_copy(update={"cancel_grace_seconds": 0.2})
    running = runner(program(f"{STUBBORN}\n{diary.note('os.getpid()')}\n{FOREVER}"), impatient)
    thread = in_background(running.help)
    [pid] = eventually(diary.read)
    if event == "another job":
        submit()
    elif event == "a cancellation":
        cancel(job_id)
    else:
        with database.transaction() as session:
            leases.release_job(session, lease)
    thread.join()
    assert not is_alive(int(pid))
