"""A seccomp filter against system calls that computing on files never needs.

Landlock restricts files, but neither UDP nor Unix sockets, such as that of a local database server. So all ways to open
a socket are refused, including `io_uring`, which would bypass the filter, and calls that inspect other processes or
change the kernel.
"""

import ctypes
import errno
import os
import platform
import socket
import stat
import struct
import sys
from contextlib import suppress
from pathlib import Path

from app.shared.confinement import kernel

_SET_MODE_FILTER = 1
_ALL_THREADS = 1
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
# Offsets in the kernel's `struct seccomp_data`.
_NUMBER, _ARCHITECTURE = 0, 4
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
# Numbers from here on are x32 calls of an x86-64 kernel.
_X32 = 0x40000000

# By machine: architecture constants of the kernel, numbers of `seccomp`, and refused calls.
_NETWORK = {
    "x86_64": {"socket": 41, "connect": 42, "accept": 43, "bind": 49, "listen": 50, "accept4": 288},
    "aarch64": {"socket": 198, "connect": 203, "accept": 202, "bind": 200, "listen": 201, "accept4": 242},
}
_NEVER = {
    "x86_64": {
        "ptrace": 101,
        "pivot_root": 155,
        "mount": 165,
        "umount2": 166,
        "init_module": 175,
        "delete_module": 176,
        "kexec_load": 246,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "unshare": 272,
        "perf_event_open": 298,
        "open_by_handle_at": 304,
        "setns": 308,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "finit_module": 313,
        "bpf": 321,
        "userfaultfd": 323,
        "io_uring_setup": 425,
        "pidfd_getfd": 438,
    },
    "aarch64": {
        "umount2": 39,
        "mount": 40,
        "pivot_root": 41,
        "unshare": 97,
        "kexec_load": 104,
        "init_module": 105,
        "delete_module": 106,
        "ptrace": 117,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "perf_event_open": 241,
        "open_by_handle_at": 265,
        "setns": 268,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "finit_module": 273,
        "bpf": 280,
        "userfaultfd": 282,
        "io_uring_setup": 425,
        "pidfd_getfd": 438,
    },
}
_AUDIT_NAMES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SECCOMP = {"x86_64": 317, "aarch64": 277}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def can_filter() -> bool:
    """Return whether system calls can be filtered here."""
    return sys.platform == "linux" and platform.machine() in _SECCOMP and Path("/proc/sys/kernel/seccomp").is_dir()


def refuse_calls(*, network: bool) -> bool:
    """Refuse system calls in all threads of this process, irrevocably; they fail with EACCES.

    Privileges must have been given up before.

    Args:
        network: also refuse new sockets and connections.

    Returns:
        Whether the kernel enforces it.
    """
    if not can_filter():
        return False
    machine = platform.machine()
    refused = sorted({*_NEVER[machine].values(), *(_NETWORK[machine].values() if network else ())})
    code = _program(_AUDIT_NAMES[machine], refused)
    program = _Program(length=len(code) // 8, filter=code)
    try:
        # A positive result is the id of a thread that could not be included.
        return kernel.call(_SECCOMP[machine], _SET_MODE_FILTER, _ALL_THREADS, ctypes.byref(program)) == 0
    except OSError:
        return False


def end_connections() -> None:
    """Shut down all open network connections of this process."""
    with os.scandir("/proc/self/fd") as entries:
        descriptors = [int(entry.name) for entry in entries]
    for descriptor in descriptors:
        # The descriptor of the listing is closed by now, and connections may have ended.
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                # A duplicate, because the object closes its descriptor.
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    if connection.family in {socket.AF_INET, socket.AF_INET6}:
                        connection.shutdown(socket.SHUT_RDWR)


def _program(architecture: int, refused: list[int]) -> bytes:
    """Return a classic BPF program that refuses some calls and those of other architectures, and allows the rest."""
    count = len(refused)
    refuse = _ERRNO | errno.EACCES
    # Jumps count the instructions in between; the refusal is the last one.
    steps = [
        _step(_LOAD, 0, 0, _ARCHITECTURE),
        _step(_EQUAL, 0, count + 3, architecture),
        _step(_LOAD, 0, 0, _NUMBER),
        _step(_AT_LEAST, count + 1, 0, _X32),
        *(_step(_EQUAL, count - position, 0, number) for position, number in enumerate(refused)),
        _step(_RETURN, 0, 0, _ALLOW),
        _step(_RETURN, 0, 0, refuse),
    ]
    return b"".join(steps)


def _step(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
