"""Spare processes: forked from a process that has imported the library, they become the programs of a job's attempt.

An attempt forks them before it receives its secrets, and while it has one thread. A spare waits until it is told which
program to run; it then differs from a process that was started as that program only in having imported it already.
"""

import importlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import setproctitle
from pydantic import TypeAdapter

from app.shared.confinement import Sandbox
from app.shared.fork_server import exit_after
from worker.processes.channel import Channel, ChannelClosedError, ChannelError, Message
from worker.processes.children import PROGRAMS, ChildProcess, start_program
from worker.processes.linux import die_with

_MILLISECONDS = 1000
_log = logging.getLogger(__name__)
_LINKS = ("HOME", "TMPDIR")
# Variables with paths of a job's own folders.
_OWN_FOLDERS = ("HF_HOME", "HF_HUB_CACHE", *_LINKS)


class Assignment(Message):
    """What a spare process becomes.

    Attributes:
        module: module of the program.
        folder: working directory.
        environment: all variables.
        title: command line to show in lists of processes.
    """

    module: str
    folder: Path
    environment: dict[str, str]
    title: str


ASSIGNMENT = TypeAdapter(Assignment)


class ForkedProcess:
    """A forked child of this process, with the methods of `subprocess.Popen`; Linux only.

    Args:
        pid: its process id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)
        self._code: int | None = None
        # `wait` may be called by several threads.
        self._lock = threading.Lock()

    @property
    def returncode(self) -> int | None:
        """Exit code, or the negative number of the signal that ended it; None if `wait` has not returned yet."""
        return self._code

    def send_signal(self, sig: int, /) -> None:
        """Send a signal if it is still running."""
        with self._lock:
            if self._code is None:
                signal.pidfd_send_signal(self._descriptor, sig)

    def kill(self) -> None:
        """Send SIGKILL if it is still running."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code.

        Raises:
            subprocess.TimeoutExpired: it is still running.
        """
        if self._code is None:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * _MILLISECONDS):
                raise subprocess.TimeoutExpired(("fork",), timeout or 0.0)
            with self._lock:
                if self._code is None:
                    self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                    os.close(self._descriptor)
        return self._code


class Spares:
    """Launcher of an attempt's programs that uses spare processes first.

    The home and the folder for temporary files of this process must be links: libraries keep their paths from when they
    were imported, so the links are set to a job's folders instead.

    Args:
        count: how many processes to fork.
        unneeded: sockets that the spares must not keep.
    """

    def __init__(self, count: int, *, unneeded: Sequence[socket.socket]) -> None:
        self._environment = {name: os.environ[name] for name in _OWN_FOLDERS}
        self._waiting: list[tuple[ForkedProcess, socket.socket, IO[bytes]]] = []
        try:
            for _number in range(count):
                self._waiting.append(self._fork(unneeded))
        except OSError as error:
            _log.warning("no process can be forked in advance, so the job starts more slowly: %s", error)

    def __call__(
        self, program: Sequence[str], environment: Mapping[str, str], name: str, sandbox: Sandbox
    ) -> ChildProcess:
        """Start a program; see `worker.processes.children.Launcher`."""
        if tuple(program) not in PROGRAMS or not self._waiting:
            return start_program(program, environment, name, sandbox)
        module = program[-1]
        for variable in _LINKS:
            _point_to(Path(self._environment[variable]), Path(environment[variable]))
        process, connection, output = self._waiting.pop(0)
        child = ChildProcess(process, connection, output, spared=self._waiting_pids)
        title = f"{sys.executable} -P -m {module} {connection.fileno()} {os.getpid()} {name}"
        variables = {**environment, **self._environment}
        try:
            child.channel.send(Assignment(module=module, folder=Path.cwd(), environment=variables, title=title))
        except ChannelError as error:
            child.kill()
            raise OSError("a spare process has ended") from error
        return child

    def _waiting_pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process, _connection, _output in self._waiting)

    def _fork(self, unneeded: Sequence[socket.socket]) -> tuple[ForkedProcess, socket.socket, IO[bytes]]:
        ours, theirs = socket.socketpair()
        reader, writer = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            exit_after(lambda: _become_program(theirs, writer, parent, (*self._inherited(), *unneeded, ours), reader))
        theirs.close()
        os.close(writer)
        return ForkedProcess(pid), ours, os.fdopen(reader, "rb")

    def _inherited(self) -> tuple[socket.socket, ...]:
        for _process, _connection, output in self._waiting:
            output.close()
        return tuple(connection for _process, connection, _output in self._waiting)


def _point_to(link: Path, folder: Path) -> None:
    # A template removes the folder when it ends; another may have been started since.
    link.parent.mkdir(mode=0o711, exist_ok=True)
    new = link.with_name(f"{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(folder, target_is_directory=True)
    new.replace(link)


def _become_program(
    connection: socket.socket, output: int, parent: int, unneeded: Sequence[socket.socket], reader: int
) -> None:
    die_with(parent)
    os.close(reader)
    for inherited in unneeded:
        inherited.close()
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    channel = Channel(connection)
    try:
        assignment = channel.receive(ASSIGNMENT)
    except ChannelClosedError:
        return
    assert assignment is not None
    os.chdir(assignment.folder)
    adopt_environment(assignment.environment, assignment.title)
    importlib.import_module(assignment.module).run(channel)


def adopt_environment(environment: Mapping[str, str], title: str) -> None:
    """Replace the variables of this process and its title in lists of processes."""
    # First, as it looks for a variable of the template.
    setproctitle.setproctitle(title)
    os.environ.clear()
    os.environ.update(environment)
    # The folder is chosen anew, by the new variables.
    tempfile.tempdir = None
