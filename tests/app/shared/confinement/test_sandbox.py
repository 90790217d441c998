"""Confinement of separate processes, because it cannot be undone."""

import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from app.shared.confinement import MemoryGroup, may_change_user, supported
from tests.app.shared.confinement.confined_program import ROOT, run

CONTENT = "the service's secret"

needs_landlock = pytest.mark.skipif(not supported().files, reason="this kernel has no Landlock")
needs_seccomp = pytest.mark.skipif(not supported().calls, reason="this system has no seccomp")


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "data" / "secret.key"
    file.parent.mkdir()
    file.write_text(CONTENT)
    return file


@needs_landlock
def test_only_named_files_can_be_read(tmp_path, secret):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "LICENSE").symlink_to(secret)
    code = """
    model, secret = Path(sys.argv[1]), Path(sys.argv[2])
    print(enter_sandbox(Sandbox(readable=(model,))).files)
    for file in (model / "config.json", model / "LICENSE", secret, Path("/etc/shadow")):
        print(attempt(file.read_text))
    print(attempt(lambda: (model / "new").write_text("x")))
    print(attempt(lambda: os.listdir(secret.parent)))
    """
    assert run(code, model, secret) == ["True", "{}", *["PermissionError"] * 5]


@needs_landlock
def test_only_writable_folders_can_be_written(tmp_path, secret):
    work, cache = tmp_path / "work", tmp_path / "cache"
    work.mkdir()
    cache.mkdir()
    code = """
    work, cache, secret = map(Path, sys.argv[1:])
    enter_sandbox(Sandbox(writable=(work, cache)))
    (work / "a").write_text("a")
    (work / "folder").mkdir()
    (work / "a").replace(work / "folder" / "b")
    os.link(work / "folder" / "b", cache / "c")
    print((cache / "c").read_text())
    (cache / "c").unlink()
    print(attempt(lambda: os.link(secret, work / "stolen")))
    print(attempt(lambda: (work / "folder" / "b").rename(secret.parent / "out")))
    print(attempt(lambda: os.truncate(secret, 0)))
    """
    # A link from outside is refused with EXDEV, as between two file systems.
    assert run(code, work, cache, secret) == ["a", "OSError", "PermissionError", "PermissionError"]
    assert secret.read_text() == CONTENT


@needs_landlock
def test_the_checkout_around_imported_packages_is_not_readable(tmp_path):
    (tmp_path / "rocket-data").mkdir()
    (tmp_path / "rocket-data" / "secret.key").write_text(CONTENT)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("value = 7")
    code = """
    enter_sandbox(Sandbox())
    import package
    print(package.value)
    print(attempt(Path(sys.argv[1], "rocket-data", "secret.key").read_text))
    """
    assert run(code, tmp_path, env={"PYTHONPATH": f"{ROOT}:{tmp_path}"}) == ["7", "PermissionError"]


@needs_landlock
def test_the_parent_can_neither_be_read_nor_signalled():
    code = """
    enter_sandbox(Sandbox())
    parent = os.getppid()
    print(attempt(Path(f"/proc/{parent}/environ").read_bytes))
    print(attempt(lambda: os.readlink(f"/proc/{parent}/fd/0")))
    print(attempt(lambda: os.kill(parent, 0)))
    status = dict(line.split(":\\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(status["NoNewPrivs"], int(status["CapEff"], 16) & ~0b11111)
    """
    assert run(code) == [*["PermissionError"] * 3, "1 0"]


@needs_landlock
def test_children_are_confined_too(secret):
    code = """
    import subprocess
    enter_sandbox(Sandbox())
    print(subprocess.run(["/bin/cat", sys.argv[1]], capture_output=True).returncode)
    """
    assert run(code, secret) == ["1"]


@needs_seccomp
@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"])
def test_no_socket_can_be_opened_without_network(family):
    code = """
    enter_sandbox(Sandbox())
    kind = socket.SOCK_RAW if sys.argv[1] == "AF_NETLINK" else socket.SOCK_STREAM
    print(attempt(lambda: socket.socket(getattr(socket, sys.argv[1]), kind)))
    one, other = socket.socketpair()
    one.send(b"a pair is no way out")
    print(other.recv(100).decode())
    """
    assert run(code, family) == ["PermissionError", "a pair is no way out"]


@pytest.mark.skipif(not may_change_user(), reason="this process may not change its user")
def test_another_user_cannot_read_what_the_first_one_could(secret):
    secret.chmod(0o600)
    code = """
    from app.shared.confinement import become_user
    secret = Path(sys.argv[1])
    become_user(10002)
    print(os.getresuid(), os.getresgid(), os.getgroups(), attempt(secret.read_text))
    print(len(os.listdir("/proc/self/fd")) > 2, attempt(lambda: os.setuid(0)))
    """
    user = (10002, 10002, 10002)
    assert run(code, secret) == [f"{user} {user} [] PermissionError", "True PermissionError"]


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@needs_seccomp
def test_the_network_can_be_closed_later_in_all_threads(listener):
    code = """
    address = ("127.0.0.1", int(sys.argv[1]))
    enter_sandbox(Sandbox(network=True))
    before = socket.create_connection(address)
    closed, seen = threading.Event(), []

    def other():
        closed.wait()
        seen.append(attempt(lambda: socket.create_connection(address)))

    thread = threading.Thread(target=other)
    thread.start()
    print(close_network())
    closed.set()
    thread.join()
    print(*seen, attempt(lambda: socket.create_connection(address)), attempt(lambda: before.send(b"x")))
    """
    accepted = []
    accepting = threading.Thread(target=lambda: accepted.append(listener.accept()[0]))
    accepting.start()
    assert run(code, listener.getsockname()[1]) == ["True", "PermissionError PermissionError BrokenPipeError"]
    accepting.join()
    accepted[0].close()


def test_memory_is_limited_for_good():
    code = """
    limit_memory(2**28)
    try:
        bytearray(2**29)
    except MemoryError:
        print("refused")
    print(resource.getrlimit(resource.RLIMIT_DATA))
    """
    assert run(code) == ["refused", str((2**28, 2**28))]


@pytest.fixture
def group():
    made = MemoryGroup.try_create(f"rocket-test-{time.monotonic_ns()}", 2**27, processes=8)
    if made is None:
        pytest.skip("no control group can be made here")
    yield made
    made.remove()


def eat(byte_count):
    code = f"import sys; sys.stdin.readline(); held = bytearray({byte_count}); print(len(held))"
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_a_group_kills_a_process_beyond_its_limit(group):
    process = eat(2**29)
    group.add(process.pid)
    process.communicate(b"\n", timeout=180)
    assert process.returncode == -9
    assert group.was_exceeded()


def test_a_process_within_the_raised_group_limit_survives(group):
    group.set_limit(2**30)
    process = eat(2**28)
    group.add(process.pid)
    out, _ = process.communicate(b"\n", timeout=180)
    assert (process.returncode, int(out)) == (0, 2**28)
    assert not group.was_exceeded()


def test_a_group_limits_the_number_of_processes(group):
    code = """
    sys.stdin.readline()
    children = []
    try:
        for _ in range(20):
            children.append(os.fork())
            if children[-1] == 0:
                time.sleep(60)
    except BlockingIOError:
        print(len(children) < 10)
    for child in children:
        os.kill(child, signal.SIGKILL)
    """
    program = "import os, signal, sys, time\n" + textwrap.dedent(code)
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    group.add(process.pid)
    out, _ = process.communicate(b"\n", timeout=180)
    assert out == b"True\n"
