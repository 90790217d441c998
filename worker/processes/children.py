"""Starting the processes of an attempt, and killing them with everything that they have started."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Protocol

from app.shared.confinement import Sandbox
from worker.processes.channel import Channel
from worker.processes.linux import kill_orphans
from worker.processes.output import Output

FETCH_PROGRAM = ("-m", "worker.confined.fetch")
"""Interpreter arguments for downloading a model, followed by a descriptor, this process's id and the job's id."""
PUSH_PROGRAM = ("-m", "worker.confined.push")
"""Interpreter arguments for pushing an artifact to the Hub, with the same arguments."""
COMPUTE_PROGRAM = ("-m", "worker.confined.compute")
"""Interpreter arguments for everything else."""
PROGRAMS = (FETCH_PROGRAM, PUSH_PROGRAM, COMPUTE_PROGRAM)

_END_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a process ended.

    Attributes:
        exit_code: as in `subprocess`: negative numbers are signals.
        last_words: the last lines that it printed.
    """

    exit_code: int
    last_words: str


class Child(Protocol):
    """A process, or a thread that replaces it in tests."""

    @property
    def channel(self) -> Channel:
        """Connection to it."""

    @property
    def pid(self) -> int | None:
        """Process id; None if it is not a process."""

    def ask_to_stop(self) -> None:
        """Ask it to stop at the next step."""

    def wait(self) -> Ending:
        """Wait for it to exit, and kill it after a timeout; may be called again."""

    def kill(self) -> Ending:
        """Kill it, and what it has started, immediately."""


class Launcher(Protocol):
    """A callable that starts processes, which tests replace."""

    def __call__(self, program: Sequence[str], environment: Mapping[str, str], name: str, sandbox: Sandbox) -> Child:
        """Start a program.

        Args:
            program: interpreter arguments.
            environment: all variables.
            name: last argument of the program, by which an operator finds it.
            sandbox: what it will be confined to.
        """


class OwnProcess(Protocol):
    """A child of this process, as `subprocess.Popen` controls it."""

    pid: int

    @property
    def returncode(self) -> int | None:
        """Exit code, or the negative number of the signal that ended it; None while it is running."""

    def send_signal(self, sig: int, /) -> None:
        """Send a signal if it is still running."""

    def kill(self) -> None:
        """Send SIGKILL if it is still running."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raise `subprocess.TimeoutExpired` after the timeout."""


class ChildProcess:
    """A process in the session of this one, whose output is logged.

    Args:
        process: the process.
        connection: socket connected to it.
        output: what it prints.
        spared: returns the process ids that survive when this process is killed with all its descendants.
    """

    def __init__(
        self,
        process: OwnProcess,
        connection: socket.socket,
        output: IO[bytes],
        *,
        spared: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._process = process
        self._spared = spared
        self.channel = Channel(connection)
        self._output = Output(output)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def ask_to_stop(self) -> None:
        """Send SIGTERM."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> Ending:
        """Wait for it to exit, and kill it after a timeout."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        return self.kill()

    def kill(self) -> Ending:
        """Kill it, and what it has started."""
        self.channel.close()
        self._process.kill()
        exit_code = self._process.wait()
        kill_orphans(spared=self._spared())
        return Ending(exit_code=exit_code, last_words=self._output.finish())


def start_program(
    program: Sequence[str],
    environment: Mapping[str, str],
    name: str,
    sandbox: Sandbox,  # noqa: ARG001 - it confines itself
) -> ChildProcess:
    """Start a process that imports what it needs; a `Launcher`."""
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = [str(theirs.fileno()), str(os.getpid()), name]
        # It stays in the process group of this one, so that killing the group kills it too.
        process = subprocess.Popen(  # noqa: S603  # our own interpreter, module and arguments
            [sys.executable, "-P", *program, *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
        )
    assert process.stdout is not None
    return ChildProcess(process, ours, process.stdout)
