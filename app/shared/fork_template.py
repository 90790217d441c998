"""The process that `app.shared.fork_server` forks from, started as a program.

It has one thread and never reads its children's questions.
"""

import ctypes
import errno
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from app.shared.fork_server import MOST_DESCRIPTORS, WORD, exit_after

Entry = Callable[[Sequence[int]], None]

_PR_SET_PDEATHSIG = 1
_RECEIVED_SIGNALS = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM)


class Template:
    """Forks children on request, and reports their process ids and exit codes.

    Args:
        control: the socket for requests; the template ends when it is closed.
        entry: the function that a child calls.
    """

    def __init__(self, control: socket.socket, entry: Entry) -> None:
        self._control = control
        self._entry = entry
        self._children: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._waker = socket.socketpair()
        self._pid = os.getpid()

    def serve(self) -> None:
        """Fork on request until the client is gone; then end all children."""
        self._waker.setblocking(False)
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno())
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        # A service manager may send these to all processes of a service; the client decides when this one ends.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        while True:
            for key, _events in self._selector.select():
                if key.fileobj is self._control:
                    if not self._accept():
                        self._end()
                        return
                elif key.fileobj is self._wakeup:
                    self._reap()
                else:
                    self._obey(key.data)

    def _accept(self) -> bool:
        try:
            word, descriptors, _flags, _address = socket.recv_fds(self._control, 1, MOST_DESCRIPTORS)
        except ConnectionError:
            return False
        if not word:
            return False
        if not descriptors:
            # The system had no descriptors left; the client sees its own socket closed.
            return True
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        status = socket.socket(fileno=descriptors[0])
        try:
            pid = os.fork()
        except OSError as error:
            # The system has no process or memory left now; the other children are unaffected.
            pid = -(error.errno or errno.EAGAIN)
        if pid == 0:
            self._become_child(status, descriptors[1:])
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        status.setblocking(False)
        if pid < 0:
            _tell(status, pid)
            status.close()
            return True
        self._children[pid] = status
        self._selector.register(status, selectors.EVENT_READ, data=pid)
        _tell(status, pid)
        return True

    def _become_child(self, status: socket.socket, descriptors: Sequence[int]) -> NoReturn:
        def work() -> None:
            signal.set_wakeup_fd(-1)
            for number in _RECEIVED_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            _end_with(self._pid)
            self._selector.close()
            for other in (self._control, self._wakeup, self._waker, status, *self._children.values()):
                other.close()
            self._entry(descriptors)

        exit_after(work)

    def _obey(self, pid: int) -> None:
        """Pass on signals from the client, or end a child whose client has closed its socket."""
        # Its socket would be closed if it had been reaped, so the id is still its own.
        status = self._children.get(pid)
        if status is None:
            return
        try:
            numbers = status.recv(64)
        except BlockingIOError:
            return
        except ConnectionError:
            numbers = b""
        for number in numbers or bytes([signal.SIGKILL]):
            with suppress(OSError):
                os.kill(pid, number)
        if not numbers:
            self._selector.unregister(status)

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            while self._wakeup.recv(4096):
                pass
        for pid, status in list(self._children.items()):
            ended, code = os.waitpid(pid, os.WNOHANG)
            if ended == 0:
                continue
            with suppress(KeyError):
                self._selector.unregister(status)
            _tell(status, os.waitstatus_to_exitcode(code))
            status.close()
            del self._children[pid]

    def _end(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)


def _tell(status: socket.socket, value: int) -> None:
    # The client may have closed its socket.
    with suppress(OSError):
        status.sendall(WORD.pack(value))


def _end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, where that is supported."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def _require_one_thread() -> None:
    tasks = Path("/proc/self/task")
    count = len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()
    if count != 1:
        # A lock that another thread holds would stay locked in every child.
        raise RuntimeError(f"the imported modules have started {count - 1} threads; children cannot be forked safely")


def main(arguments: Sequence[str]) -> None:
    """Import, then fork on request.

    Args:
        arguments: descriptor of the socket, `module:function`, a folder to remove at the end or "", further modules to
            import.
    """
    descriptor, entry, scratch, *preload = arguments
    os.set_inheritable(int(descriptor), False)
    with socket.socket(fileno=int(descriptor)) as control:
        module, _, name = entry.partition(":")
        # Imports create few cycles and many objects, which each collection would visit.
        gc.disable()
        for further in preload:
            importlib.import_module(further)
        function: Entry = getattr(importlib.import_module(module), name)
        _require_one_thread()
        gc.collect()
        # Otherwise children would copy the pages of objects that garbage collection marks.
        gc.freeze()
        gc.enable()
        Template(control, function).serve()
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
