"""The system calls of a confined process: those that computing on files needs, and no others.

Landlock restricts files, but neither UDP nor Unix sockets, nor changes of modes, owners and times of files, nor what
one process may do to another of its user. So everything is refused but the calls listed here, which refuses what
kernels will add as well. They are those that torch, transformers and Python make, measured with a filter that logs what
it would refuse while the tests of jobs ran on x86-64; further calls that differ from them only in age or width; and the
memory policies that drivers of accelerators set.
"""

import errno
import os
import platform
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path

from app.shared.confinement import kernel
from app.shared.confinement.bpf import ARCHITECTURES, Condition, program

# Name, and number on x86-64 and on aarch64.
_ALWAYS = """
    access 21 -, chdir 80 49, close 3 57, close_range 436 436, copy_file_range 326 285, creat 85 -, dup 32 23,
    dup2 33 -, dup3 292 24, faccessat 269 48, faccessat2 439 439, fadvise64 221 223, fchdir 81 50, fdatasync 75 83,
    flock 73 32, fstat 5 80, fstatfs 138 44, fsync 74 82, ftruncate 77 46, getcwd 79 17, getdents 78 -,
    getdents64 217 61, link 86 -, linkat 265 37, lseek 8 62, lstat 6 -, mkdir 83 -, mkdirat 258 34,
    newfstatat 262 79, open 2 -, openat 257 56, openat2 437 437, pipe 22 -, pipe2 293 59, pread64 17 67,
    preadv 295 69, preadv2 327 286, pwrite64 18 68, pwritev 296 70, pwritev2 328 287, read 0 63, readahead 187 213,
    readlink 89 -, readlinkat 267 78, readv 19 65, rename 82 -, renameat 264 38, renameat2 316 276, rmdir 84 -,
    sendfile 40 71, splice 275 76, stat 4 -, statfs 137 43, statx 332 291, symlink 88 -, symlinkat 266 36,
    sync_file_range 277 84, umask 95 166, unlink 87 -, unlinkat 263 35, write 1 64, writev 20 66,
    brk 12 214, get_mempolicy 239 236, madvise 28 233, mbind 237 235, membarrier 324 283, memfd_create 319 279,
    mincore 27 232, mlock 149 228, mlock2 325 284, mmap 9 222, mprotect 10 226, mremap 25 216, msync 26 227,
    munlock 150 229, munmap 11 215, set_mempolicy 238 237,
    arch_prctl 158 -, execve 59 221, execveat 322 281, exit 60 93, exit_group 231 94, fork 57 -, futex 202 98,
    futex_waitv 449 449, get_robust_list 274 100, getcpu 309 168, getegid 108 177, geteuid 107 175, getgid 104 176,
    getgroups 115 158, getpgid 121 155, getpgrp 111 -, getpid 39 172, getppid 110 173, getpriority 140 141,
    getresgid 120 150, getresuid 118 148, getrlimit 97 163, getrusage 98 165, getsid 124 156, gettid 186 178,
    getuid 102 174, rseq 334 293, sched_get_priority_max 146 125, sched_get_priority_min 147 126,
    sched_getaffinity 204 123, sched_getparam 143 121, sched_getscheduler 145 120, sched_yield 24 124,
    seccomp 317 277, set_robust_list 273 99, set_tid_address 218 96, sysinfo 99 179, times 100 153, uname 63 160,
    vfork 58 -, wait4 61 260, waitid 247 95,
    pause 34 -, restart_syscall 219 128, rt_sigaction 13 134, rt_sigpending 127 136, rt_sigprocmask 14 135,
    rt_sigreturn 15 139, rt_sigsuspend 130 133, rt_sigtimedwait 128 137, sigaltstack 131 132, signalfd 282 -,
    signalfd4 289 74,
    alarm 37 -, clock_getres 229 114, clock_gettime 228 113, clock_nanosleep 230 115, getitimer 36 102,
    gettimeofday 96 169, nanosleep 35 101, setitimer 38 103, time 201 -, timer_create 222 107, timer_delete 226 111,
    timer_getoverrun 225 109, timer_gettime 224 108, timer_settime 223 110, timerfd_create 283 85,
    timerfd_gettime 287 87, timerfd_settime 286 86,
    epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_pwait 281 22, epoll_pwait2 441 441,
    epoll_wait 232 -, eventfd 284 -, eventfd2 290 19, poll 7 -, ppoll 271 73, pselect6 270 72, select 23 -,
    getpeername 52 205, getsockname 51 204, getsockopt 55 209, recvfrom 45 207, recvmmsg 299 243, recvmsg 47 212,
    sendmmsg 307 269, sendmsg 46 211, sendto 44 206, setsockopt 54 208, shutdown 48 210,
    getrandom 318 278
"""
_NETWORK = """
    accept 43 202, accept4 288 242, bind 49 200, connect 42 203, listen 50 201, socket 41 198
"""
# Allowed for some arguments only; see `_rules`.
_SOMETIMES = """
    clone 56 220, fcntl 72 25, ioctl 16 29, kill 62 129, prctl 157 167, prlimit64 302 261, sched_setaffinity 203 122,
    setpriority 141 140, socketpair 53 199, tgkill 234 131, utimensat 280 88
"""

# Newer than these, C libraries must do without a call; they ask for it first and look at the error.
_FIRST_OPTIONAL = 424

# New namespaces; `clone3`, whose arguments a filter cannot see, is refused in a way that makes C libraries use `clone`.
_NEW_NAMESPACES = 0x7E020000
# A signal of one's choice to a process of one's choice, notice of changes in folders, and delays of other readers.
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY = 8, 10, 15, 1024, 1026
# Input for a terminal, owners of signals, and attributes of files, which need no right to write to them.
_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP = 0x5412, 0x541C, 0x8901, 0x8902
_FS_IOC_SETFLAGS, _FS_IOC32_SETFLAGS, _FS_IOC_FSSETXATTR = 0x40086602, 0x40046602, 0x401C5820
_PR_SET_PDEATHSIG = 1
_PRIO_PROCESS = 0
_SOCKET_KINDS = 0xF


def refuse_calls(*, network: bool, signals: bool) -> bool:
    """Refuse all but the listed system calls in all threads of this process, irrevocably.

    Privileges must have been given up before. Refused calls fail with EACCES, or ENOSYS if they are so new that
    programs must expect it.

    Args:
        network: also refuse new sockets and connections.
        signals: also refuse signals to any process but this one.

    Returns:
        Whether the kernel enforces it.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ARCHITECTURES or not Path("/proc/sys/kernel/seccomp").is_dir():
        return False
    listed = _ALWAYS if network else f"{_ALWAYS}, {_NETWORK}"
    sometimes = _numbers(_SOMETIMES, machine)
    code = program(
        ARCHITECTURES[machine],
        allowed=sorted(_numbers(listed, machine).values()),
        conditional={sometimes[name]: rule for name, rule in _rules(os.getpid(), signals=signals).items()},
        errors=(errno.EACCES, _FIRST_OPTIONAL, errno.ENOSYS),
    )
    try:
        return kernel.filter_calls(_numbers(_ALWAYS, machine)["seccomp"], code)
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


def _rules(own: int, *, signals: bool) -> dict[str, tuple[Condition, ...]]:
    """Return what the arguments of calls must satisfy.

    Args:
        own: id of this process; a call that names a process may name no other.
        signals: whether that holds for signals, too.
    """
    itself = frozenset({0, own})
    to_itself = (Condition(0, frozenset({own})),) if signals else ()
    return {
        "clone": (Condition(0, frozenset({0}), mask=_NEW_NAMESPACES),),
        "fcntl": (Condition(1, frozenset({_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY}), refused=True),),
        "ioctl": (
            Condition(
                1,
                frozenset(
                    {_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP}
                    | {_FS_IOC_SETFLAGS, _FS_IOC32_SETFLAGS, _FS_IOC_FSSETXATTR}
                ),
                refused=True,
            ),
        ),
        "kill": to_itself,
        # It ends with the process that started it.
        "prctl": (Condition(0, frozenset({_PR_SET_PDEATHSIG}), refused=True),),
        # Limits may be read.
        "prlimit64": (Condition(0, itself), *_null(2)),
        "sched_setaffinity": (Condition(0, itself),),
        "setpriority": (Condition(0, frozenset({_PRIO_PROCESS})), Condition(1, itself)),
        # A datagram socket could send to any Unix socket.
        "socketpair": (Condition(1, frozenset({socket.SOCK_STREAM}), mask=_SOCKET_KINDS),),
        "tgkill": to_itself,
        # An open file is marked as used now; neither a path nor a time is given.
        "utimensat": (*_null(1), *_null(2)),
    }


def _null(argument: int) -> tuple[Condition, Condition]:
    return Condition(argument, frozenset({0})), Condition(argument, frozenset({0}), high=True)


def _numbers(table: str, machine: str) -> dict[str, int]:
    """Return the numbers of a table's calls on a machine; those that it lacks are left out."""
    column = list(ARCHITECTURES).index(machine)
    rows = (row.split() for row in table.split(","))
    return {name: int(numbers[column]) for name, *numbers in rows if numbers[column] != "-"}
