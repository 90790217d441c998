"""Real processes: one template per module, children on demand."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from app.shared.fork_server import ForkServer, ForkServerError

ROOT = Path(__file__).parents[3]
PROGRAMS = "tests.reference.forked_programs"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "MARK": "chosen"}


@pytest.fixture
def make_server():
    made = []

    def make(function="act", **options):
        made.append(ForkServer(f"{PROGRAMS}:{function}", environment=ENVIRONMENT, **options))
        return made[-1]

    yield make
    for server in made:
        server.close()
        assert server.pid is None


@pytest.fixture(scope="module")
def shared():
    server = ForkServer(f"{PROGRAMS}:act", environment=ENVIRONMENT)
    yield server
    server.close()


@pytest.fixture
def ask():
    """Return a function that runs a program in a child, and returns the child and a socket to it."""
    opened = []

    def ask(server, word):
        ours, theirs = socket.socketpair()
        with theirs:
            child = server.fork([theirs.fileno()])
        opened.extend((ours, child))
        ours.settimeout(60)
        ours.sendall(word.encode())
        return child, ours

    yield ask
    for one in opened:
        one.close()


def wait_until(holds, seconds=30):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


def is_gone(pid):
    def is_gone():
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return wait_until(is_gone)


def test_a_child_answers_and_its_exit_code_is_known(shared, ask):
    child, channel = ask(shared, "echo")
    assert channel.recv(100) == b"echo"
    assert child.wait(60) == 0
    assert child.wait(60) == 0
    assert child.pid() != shared.pid != os.getpid()


@pytest.mark.parametrize(("word", "code"), [("exit", 7), ("raise", 1), ("spin", -signal.SIGXCPU)])
def test_each_way_a_child_ends_has_its_exit_code(shared, ask, word, code):
    child, _ = ask(shared, word)
    assert child.wait(60) == code


def test_a_child_inherits_nothing_from_the_client(make_server, ask, monkeypatch):
    monkeypatch.setenv("ROCKET_SECRET", "of the service")
    child, channel = ask(make_server("describe", preload=("tests.reference.safetensors_files",)), "tell")
    with channel.makefile("rb") as stream:
        found = json.loads(stream.read())
    assert found["asked"] == "tell"
    assert {"MARK": "chosen"}.items() <= found["environment"].items()
    assert set(found["environment"]) <= {*ENVIRONMENT, "PYTHONPATH", "LC_CTYPE", "__CF_USER_TEXT_ENCODING"}
    assert found["threads"] == 1
    assert found["ignored"] == []
    assert "tests.reference.safetensors_files" in found["modules"]
    assert not {"torch", "sqlalchemy", "fastapi", "pydantic", "pytest"} & set(found["modules"])
    if found["descriptors"]:
        # Its channel and the listed folder; none of the template's sockets.
        assert len([number for number in found["descriptors"] if number > 2]) == 2
    assert child.wait(60) == 0


def test_a_child_can_be_killed_and_signalled(shared, ask):
    killed, channel = ask(shared, "sleep")
    assert channel.recv(100) == b"asleep"
    with pytest.raises(TimeoutError):
        killed.wait(0.05)
    killed.kill()
    assert killed.wait(60) == -signal.SIGKILL
    # It has ended: another signal has no effect.
    killed.kill()

    ended, channel = ask(shared, "sleep")
    assert channel.recv(100) == b"asleep"
    ended.send_signal(signal.SIGTERM)
    assert ended.wait(60) == -signal.SIGTERM


def test_a_closed_child_is_killed(shared, ask):
    child, channel = ask(shared, "sleep")
    assert channel.recv(100) == b"asleep"
    pid = child.pid()
    child.close()
    assert is_gone(pid)
    # The template reaps it, so that no zombie remains.
    assert ask(shared, "echo")[1].recv(100) == b"echo"
    assert is_gone(pid)


def test_concurrent_children_are_independent(shared, ask):
    before = psutil.Process(shared.pid or 0).num_fds() if shared.pid else None

    def one(_number):
        child, channel = ask(shared, "echo")
        return channel.recv(100), child.wait(60)

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(one, range(200))) == {(b"echo", 0)}
    if before is not None:
        assert psutil.Process(shared.pid).num_fds() <= before + 2


def test_a_killed_template_takes_its_children_and_is_replaced(make_server, ask):
    server = make_server()
    child, channel = ask(server, "sleep")
    assert channel.recv(100) == b"asleep"
    pid, template = child.pid(), server.pid
    os.kill(template, signal.SIGKILL)
    with pytest.raises(ForkServerError):
        child.wait(60)
    if sys.platform == "linux":
        assert is_gone(pid)
    assert ask(server, "echo")[1].recv(100) == b"echo"
    assert server.pid not in {None, template}


def test_a_failing_fork_is_an_error_and_ends_nothing(make_server, ask):
    server = make_server(preload=("tests.reference.forked_unprivileged",))
    child, channel = ask(server, "sleep")
    assert channel.recv(100) == b"asleep"
    template = server.pid
    os.kill(template, signal.SIGUSR1)
    with server.fork() as refused, pytest.raises(ForkServerError, match="temporarily unavailable"):
        refused.wait(60)
    with pytest.raises(TimeoutError):
        child.wait(0.05)
    os.kill(template, signal.SIGUSR2)
    assert ask(server, "echo")[1].recv(100) == b"echo"
    assert server.pid == template


def test_the_last_release_ends_the_template(make_server, ask):
    server = make_server()
    server.hold()
    server.hold()
    child, channel = ask(server, "sleep")
    assert channel.recv(100) == b"asleep"
    pid, template = child.pid(), server.pid
    server.release()
    assert server.pid == template
    server.release()
    assert server.pid is None
    assert is_gone(template)
    assert is_gone(pid)


def test_a_template_that_cannot_start_is_an_error(make_server, capfd):
    server = make_server("no_such_function")
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ForkServerError), server.fork([theirs.fileno()]) as child:
        child.wait(60)
    assert wait_until(lambda: server.pid is None)
    assert "no_such_function" in capfd.readouterr().err


def test_a_module_that_starts_a_thread_is_refused(make_server, capfd):
    server = make_server(preload=("tests.reference.forked_with_thread",))
    with pytest.raises(ForkServerError), server.fork() as child:
        child.wait(60)
    assert wait_until(lambda: server.pid is None)
    assert "threads; children cannot be forked safely" in capfd.readouterr().err


def test_a_template_ignores_signals_of_terminal_and_manager(make_server, ask):
    server = make_server()
    assert ask(server, "echo")[1].recv(100) == b"echo"
    template = server.pid
    assert os.getpgid(template) != os.getpgid(0)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(template, number)
    assert ask(server, "echo")[1].recv(100) == b"echo"
    assert server.pid == template


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_client(number):
    code = f"""
        import os, socket, sys, time
        from app.shared.fork_server import ForkServer
        server = ForkServer("{PROGRAMS}:sleep_at_once", environment={{}})
        child = server.fork()
        print(child.pid(), server.pid, flush=True)
        time.sleep(600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as client:
        pids = [int(pid) for pid in client.stdout.readline().split()]
        assert len(pids) == 2
        assert all(psutil.pid_exists(pid) for pid in pids)
        client.send_signal(number)
        client.wait(60)
    assert all(is_gone(pid) for pid in pids)


def test_a_client_that_ends_leaves_no_process_and_no_warning():
    code = f"""
        from app.shared.fork_server import ForkServer
        server = ForkServer("{PROGRAMS}:sleep_at_once", environment={{}})
        with server.fork() as child:
            print(child.pid(), server.pid, flush=True)
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=180)
    assert result.stderr == ""
    assert all(is_gone(int(pid)) for pid in result.stdout.split())


def test_a_fork_is_much_cheaper_than_a_start(make_server, ask):
    server = make_server(preload=("pydantic",))
    started = time.perf_counter()
    ask(server, "echo")[1].recv(100)
    start, forks = time.perf_counter() - started, []
    for _ in range(5):
        started = time.perf_counter()
        ask(server, "echo")[1].recv(100)
        forks.append(time.perf_counter() - started)
    assert min(forks) < start / 3


def test_closing_during_forks_breaks_nothing(make_server, ask):
    server, stop, failures = make_server(), threading.Event(), []

    def close_now_and_then():
        while not stop.wait(0.3):
            server.close()

    closer = threading.Thread(target=close_now_and_then)
    closer.start()
    for _ in range(20):
        child, channel = ask(server, "echo")
        try:
            child.wait(60)
        except ForkServerError:
            failures.append(channel)
    stop.set()
    closer.join()
    assert ask(server, "echo")[1].recv(100) == b"echo"
