"""System calls of a confined process, made by a program inside it."""

import os
import platform
import struct
import subprocess
import sys

import pytest

from app.shared.confinement import supported
from tests.app.shared.confinement.confined_program import run

pytestmark = [
    pytest.mark.skipif(not supported().calls, reason="this system has no seccomp"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of calls are those of x86-64"),
]

NEIGHBOUR = "import sys; print('ready', flush=True); sys.stdin.read()"
SETRLIMIT, SCHED_SETPARAM, SCHED_SETSCHEDULER, IOPRIO_SET, SCHED_SETATTR = 160, 142, 144, 251, 314
RT_SIGQUEUEINFO, MIGRATE_PAGES, MOVE_PAGES, PIDFD_OPEN, PROCESS_MADVISE, KCMP = 129, 256, 279, 434, 440, 312


@pytest.fixture
def neighbour():
    """Another process of the same user, which ends when its input does."""
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        process.stdout.readline()
        yield process.pid


def test_no_call_changes_or_watches_another_process(neighbour):
    code = f"""
    enter_sandbox(Sandbox(), required=True)
    other = int(sys.argv[1])
    print(attempt(lambda: resource.prlimit(other, resource.RLIMIT_CPU, (1, 1))))
    print(attempt(lambda: resource.prlimit(other, resource.RLIMIT_CPU)))
    print(attempt(lambda: os.sched_setaffinity(other, {{0}})))
    print(attempt(lambda: os.setpriority(os.PRIO_PROCESS, other, 19)))
    print(attempt(lambda: os.setpriority(os.PRIO_USER, 0, 19)))
    print(attempt(lambda: os.sched_setscheduler(other, os.SCHED_IDLE, os.sched_param(0))))
    print(attempt(lambda: os.kill(other, 0)))
    blank = ctypes.create_string_buffer(128)
    for number in {(SCHED_SETPARAM, SCHED_SETATTR, RT_SIGQUEUEINFO, MIGRATE_PAGES, MOVE_PAGES, KCMP)}:
        print(call(number, other, blank, blank))
    print(call({IOPRIO_SET}, 1, other, 0))
    print(call({PIDFD_OPEN}, other, 0), call({PROCESS_MADVISE}, other, 0))
    """
    before = os.sched_getaffinity(neighbour), os.getpriority(os.PRIO_PROCESS, neighbour)
    assert run(code, neighbour) == [*["PermissionError"] * 7, *["EACCES"] * 7, "ENOSYS ENOSYS"]
    assert (os.sched_getaffinity(neighbour), os.getpriority(os.PRIO_PROCESS, neighbour)) == before


def test_a_signal_to_another_process_is_refused_without_landlock(neighbour):
    code = """
    from app.shared.confinement import kernel, system_calls
    kernel.give_up_privileges()
    system_calls.refuse_calls(network=True, signals=True)
    print(attempt(lambda: os.kill(int(sys.argv[1]), signal.SIGKILL)), attempt(lambda: os.kill(0, signal.SIGKILL)))
    signal.signal(signal.SIGUSR1, lambda *_: print("its own signal"))
    os.kill(os.getpid(), signal.SIGUSR1)
    """
    assert run(code, neighbour) == ["PermissionError PermissionError", "its own signal"]


def test_signals_by_way_of_a_file_are_refused(neighbour):
    code = """
    enter_sandbox(Sandbox(), required=True)
    one, other = socket.socketpair()
    for command in (8, 10, 15, 1024, 1026):
        print(attempt(lambda: fcntl.fcntl(one, command, int(sys.argv[1]))))
    for request in (0x8901, 0x8902, 0x5412):
        print(attempt(lambda: fcntl.ioctl(one, request, b"1234")))
    """
    assert run(code, neighbour) == ["PermissionError"] * 8


def test_a_process_may_change_its_own_priority_and_processors():
    code = """
    enter_sandbox(Sandbox(), required=True)
    os.nice(1)
    os.sched_setaffinity(0, os.sched_getaffinity(0))
    os.sched_setaffinity(os.getpid(), os.sched_getaffinity(os.getpid()))
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0)
    """
    assert run(code) == ["True"]


def test_a_process_cannot_lift_its_own_limits():
    code = f"""
    limit_memory(2**30)
    enter_sandbox(Sandbox(), required=True)
    print(attempt(lambda: limit_memory(2**40)))
    print(call({SETRLIMIT}, 2, ctypes.create_string_buffer(16)))
    print(resource.getrlimit(resource.RLIMIT_DATA)[0] == 2**30)
    """
    assert run(code) == ["PermissionError", "EACCES", "True"]


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "secret.key"
    file.write_text("secret")
    file.chmod(0o600)
    return file


def test_modes_owners_and_times_cannot_be_changed(secret, tmp_path):
    (tmp_path / "own").mkdir()
    code = """
    secret, own = Path(sys.argv[1]), Path(sys.argv[2])
    enter_sandbox(Sandbox(readable=(secret,), writable=(own,)), required=True)
    for action in (
        lambda: os.chmod(secret, 0o666),
        lambda: os.chmod(secret.parent, 0),
        lambda: os.chown(secret, 1, 1),
        lambda: os.lchown(secret, 1, 1),
        lambda: os.utime(secret, (1, 1)),
        lambda: os.utime(secret),
        lambda: os.setxattr(secret, "user.a", b"b"),
        lambda: os.removexattr(secret, "user.a"),
        lambda: os.truncate(secret, 0),
    ):
        print(attempt(action))
    with secret.open() as readable:
        for action in (
            lambda: os.fchmod(readable.fileno(), 0o666),
            lambda: os.fchown(readable.fileno(), 1, 1),
            lambda: os.utime(readable.fileno(), (1, 1)),
            lambda: os.setxattr(readable.fileno(), "user.a", b"b"),
            lambda: fcntl.ioctl(readable, 0x40086602, b"12345678"),
        ):
            print(attempt(action))
    with (own / "file").open("w") as file:
        os.utime(file.fileno())
        os.ftruncate(file.fileno(), 10)
    """
    before = secret.stat()
    assert run(code, secret, tmp_path / "own") == ["PermissionError"] * 14
    after = secret.stat()
    assert (after.st_mode, after.st_uid, after.st_mtime, after.st_size) == (
        before.st_mode,
        before.st_uid,
        before.st_mtime,
        6,
    )
    assert (tmp_path / "own" / "file").stat().st_size == 10


def test_changes_of_files_cannot_be_watched():
    inotify_init1, fanotify_init = 294, 300
    code = f"""
    enter_sandbox(Sandbox(), required=True)
    print(call({inotify_init1}, 0), call({fanotify_init}, 0, 0))
    """
    assert run(code) == ["EACCES EACCES"]


def test_no_memory_outlives_the_process(tmp_path):
    shmget, msgget, semget, mq_open = 29, 68, 64, 240
    code = f"""
    enter_sandbox(Sandbox(), required=True)
    print(call({shmget}, 0, 4096, 0o600 | 0o1000), call({msgget}, 0, 0o1000), call({semget}, 0, 1, 0o1000))
    print(call({mq_open}, b"name", 0o100, 0o600, 0))
    print(attempt(lambda: Path("/dev/shm/rocket-test").write_text("x")))
    print(os.memfd_create("its own") > 0)
    """
    assert run(code) == ["EACCES EACCES EACCES", "EACCES", "PermissionError", "True"]


def test_no_namespace_can_be_made_by_any_call():
    unshare, clone, clone3, setns = 272, 56, 435, 308
    new_user, new_net, new_mount = 0x10000000, 0x40000000, 0x00020000
    code = f"""
    import subprocess
    enter_sandbox(Sandbox(), required=True)
    for flags in ({new_user}, {new_net}, {new_mount}, {new_user | new_net}):
        print(call({unshare}, flags), call({clone}, flags | signal.SIGCHLD, 0, 0, 0, 0))
    print(call({clone3}, ctypes.create_string_buffer(88), 88), call({setns}, 0, 0))
    thread = threading.Thread(target=lambda: print("a thread"))
    thread.start()
    thread.join()
    print(subprocess.run(["/bin/echo", "a", "child"], capture_output=True, text=True).stdout, end="")
    """
    assert run(code) == [*["EACCES EACCES"] * 4, "ENOSYS EACCES", "a thread", "a child"]


def test_calls_of_other_and_of_future_kernels_are_refused():
    mount, kexec_file_load, open_tree, fsopen, io_uring_setup, future = 165, 320, 428, 430, 425, 999
    code = f"""
    enter_sandbox(Sandbox(network=True), required=True)
    print(call({mount}, 0, 0, 0, 0, 0), call({kexec_file_load}, 0, 0, 0, 0, 0))
    print(call({open_tree}, 0, b"/", 0), call({fsopen}, b"tmpfs", 0))
    print(call({io_uring_setup}, 8, ctypes.create_string_buffer(120)), call({future}))
    print(call(0x40000000 | 39))
    """
    assert run(code) == ["EACCES EACCES", "ENOSYS ENOSYS", "ENOSYS ENOSYS", "EACCES"]


def test_a_pair_of_datagram_sockets_cannot_be_opened(tmp_path):
    code = """
    enter_sandbox(Sandbox(), required=True)
    print(attempt(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)))
    print(len(socket.socketpair()))
    """
    assert run(code) == ["PermissionError", "2"]


def test_descendants_stay_in_the_process_group_and_end_with_it():
    code = """
    enter_sandbox(Sandbox(), required=True)
    print(attempt(os.setsid), attempt(os.setpgrp), attempt(lambda: os.setpgid(0, 0)))
    print(call(157, 1, 0, 0, 0, 0))
    """
    assert run(code) == ["PermissionError PermissionError PermissionError", "EACCES"]


REFUSE_SECCOMP = struct.pack(
    "=" + "HBBI" * 4, 0x20, 0, 0, 0, 0x15, 0, 1, 317, 0x06, 0, 0, 0x00050001, 0x06, 0, 0, 0x7FFF0000
)
OUTER = f"""
from app.shared.confinement import kernel
kernel.give_up_privileges()
kernel.filter_calls(317, {REFUSE_SECCOMP!r})
"""


def test_an_outer_filter_that_refuses_ours_is_noticed():
    code = """
    print(supported().missing)
    try:
        enter_sandbox(Sandbox(), required=True)
    except SandboxError as error:
        print(error)
    socket.socket().close()
    """
    lines = run(code, before=OUTER)
    assert lines == ["('system calls',)", "the system does not restrict system calls of this process"]


def test_a_network_that_cannot_be_closed_is_noticed():
    code = """
    print(close_network())
    try:
        close_network(required=True)
    except SandboxError as error:
        print(error)
    """
    assert run(code, before=OUTER) == ["False", "the system does not refuse this process the network"]
