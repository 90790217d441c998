"""Operating system settings of a job's process: dying with its parent, private memory, adopting orphans."""

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from types import FrameType
from typing import NoReturn

EXIT_FENCED_OUT = 76

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


def exit_at_once() -> NoReturn:
    """Exit immediately without cleanup; the system releases open files and locks, such as that on the work folder."""
    logging.shutdown()
    os._exit(EXIT_FENCED_OUT)


def die_with(parent: int) -> None:
    """Make the system kill this process when its parent dies, so that no orphan is running when the service restarts.

    Linux only, and only if the thread that started this process outlives it; `LeaseKeeper` checks the parent too.
    """
    _set_attribute(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        exit_at_once()


def set_on_sigterm(stop: threading.Event) -> None:
    """Make SIGTERM set a flag."""

    # An exception raised in a signal handler could interrupt a commit; a flag cannot.
    def ask(_number: int, _frame: FrameType | None) -> None:
        # A second signal that arrives while this handler holds the flag's lock would deadlock.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop.set()

    signal.signal(signal.SIGTERM, ask)


def hide_memory() -> None:
    """Keep other processes of this user from reading this one's memory and environment; Linux only."""
    _set_attribute(_PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, for `kill_orphans`; Linux only."""
    _set_attribute(_PR_SET_CHILD_SUBREAPER, 1)


def kill_orphans(*, spared: Collection[int] = ()) -> None:
    """Kill all descendants of this process if it called `adopt_orphans`; others may have unrelated children.

    Args:
        spared: ids of processes to leave alone, which have started none themselves.
    """
    if not _adopts_orphans():
        return
    import psutil

    # Repeated, because a process may start another before it dies.
    while found := [child for child in psutil.Process().children(recursive=True) if child.pid not in spared]:
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found)


def _adopts_orphans() -> bool:
    adopts = ctypes.c_int(0)
    return _set_attribute(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(adopts)) and bool(adopts.value)


def _set_attribute(number: int, value: int) -> bool:
    if sys.platform != "linux":
        return False
    rest = (ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
    return bool(ctypes.CDLL(None, use_errno=True).prctl(number, *rest) == 0)
