"""Starting the process of a job's attempt: as a program, or forked from a process that has imported the library.

    worker                          started once
    └── template                    has imported torch, transformers and the library; one thread, no device, no secrets
        └── worker.attempt.job          forked in advance; receives a job, with the service's settings
            └── worker.confined.compute forked in advance by worker.attempt.job, while it knows no secrets

Importing takes seconds, which an attempt would spend before its first stage. All of these processes end with the
worker, however it ends. See `app.shared.fork_server`.
"""

import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter

from app.shared.fork_server import Child, ForkServer, ForkServerError
from worker.processes.channel import Channel, ChannelError, Message
from worker.processes.environment import confined_environment

FORKED_PROGRAM = ("-m", "worker.attempt.job")
"""Interpreter arguments of the program that a forked process runs."""
JOB_PROGRAM = FORKED_PROGRAM
"""Interpreter arguments for a job, followed by the job's id, the fence and the id of the process that started it."""

_PRELOADED = (
    "rocket_core.pipeline",
    "rocket_core.checkpoint.download",
    "rocket_core.evaluation",
    "worker.confined.computation",
    "worker.confined.compute",
    "worker.confined.fetch",
)
_TEMPLATE_VARIABLES = {
    # Its threads would start with the import; a process with threads cannot be forked safely.
    "OPENBLAS_NUM_THREADS": "1",
    # Otherwise looking for a GPU would initialize CUDA, which a forked process cannot use.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # A process's title takes the place of its arguments, and not of its variables.
    "SPT_NOENV": "1",
}
_log = logging.getLogger(__name__)


class JobStart(Message):
    """What the process of an attempt is started with.

    Attributes:
        arguments: the job's id, the fence, and options.
        folder: working directory.
        environment: all variables, with the settings of the service.
    """

    arguments: tuple[str, ...]
    folder: Path
    environment: dict[str, str]


JOB_START = TypeAdapter(JobStart)


class JobProcess(Protocol):
    """The process of an attempt; it leads a process group."""

    @property
    def pid(self) -> int:
        """Process id."""

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the exit code, or the negative number of the signal that ended it; None if it is still running."""

    def send_signal(self, number: int) -> None:
        """Send a signal if it is still running."""

    def close(self) -> None:
        """Release what refers to it, after it has ended."""


class JobProcesses(Protocol):
    """A way to start the process of an attempt."""

    def prepare(self) -> None:
        """Get ready in the background; no-op if it is."""

    def is_ready(self) -> bool:
        """Return whether `start` need not wait for `prepare`."""

    def start(self, start: JobStart) -> JobProcess:
        """Start a process.

        Raises:
            OSError: it cannot be started.
        """

    def close(self) -> None:
        """End what `prepare` started, and all processes of attempts that depend on it."""


class FreshJobs:
    """Processes that are started as programs.

    Args:
        program: interpreter arguments of a job's process.
    """

    def __init__(self, program: Sequence[str] = JOB_PROGRAM) -> None:
        self._program = tuple(program)

    def prepare(self) -> None:
        """Do nothing: each process imports what it needs."""

    def is_ready(self) -> bool:
        """Return True."""
        return True

    def start(self, start: JobStart) -> JobProcess:
        """Start a process; see `JobProcesses`."""
        job, fence, *options = start.arguments
        process = subprocess.Popen(  # noqa: S603  # our own interpreter and module; the arguments are our ids
            [sys.executable, "-P", *self._program, job, fence, str(os.getpid()), *options],
            cwd=start.folder,
            env=dict(start.environment),
            stdin=subprocess.DEVNULL,
            # The terminal's Ctrl-C must not reach it: the service decides when its jobs stop.
            start_new_session=True,
        )
        return _Program(process)

    def close(self) -> None:
        """Do nothing."""


class WarmJobs:
    """Processes that are forked from a template, of which one is always ready; programs where that fails.

    Args:
        environment: variables of the worker that the template selects from; it receives none that hold secrets.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._inherited = dict(environment)
        self._programs = FreshJobs()
        self._folder: Path | None = None
        self._server: ForkServer | None = None
        self._next: tuple[Child, Channel] | None = None

    @staticmethod
    def is_supported() -> bool:
        """Return whether this system can fork a process that has imported torch, and refer to it by a descriptor."""
        if sys.platform != "linux":
            return False
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError:
            return False
        return True

    def prepare(self) -> None:
        """Request a process from the template, and start the template if necessary."""
        if self._next is not None:
            return
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                child = self._running_server().fork([theirs.fileno()])
        except (OSError, ForkServerError) as error:
            ours.close()
            _log.warning("the next job starts more slowly, as no process can be prepared for it: %s", error)
            return
        self._next = (child, Channel(ours))

    def is_ready(self) -> bool:
        """Return whether a process is ready, or cannot be made ready."""
        if self._next is None:
            return True
        child, _channel = self._next
        return bool(select.select([child], [], [], 0)[0])

    def start(self, start: JobStart) -> JobProcess:
        """Start a process, and prepare the next."""
        process = self._start(start)
        self.prepare()
        return self._programs.start(start) if process is None else process

    def close(self) -> None:
        """End the template and all its children."""
        if self._next is not None:
            child, channel = self._next
            channel.close()
            child.close()
            self._next = None
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._folder is not None:
            # The template removes it, but may never have started.
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self, start: JobStart) -> JobProcess | None:
        if self._next is None:
            return None
        child, channel = self._next
        self._next = None
        try:
            process = _Forked(child)
            channel.send(start)
        except (ForkServerError, ChannelError) as error:
            child.close()
            _log.warning("the process that was prepared for a job has ended: %s", error)
            return None
        finally:
            channel.close()
        return process

    def _running_server(self) -> ForkServer:
        if self._server is None:
            # Libraries read the paths of their folders when they are imported; each job has its own folders there.
            self._folder = Path(tempfile.mkdtemp(prefix="rocket-worker-"))
            # A process of another user must find its folders through the links.
            self._folder.chmod(0o711)
            empty = self._folder / "empty"
            empty.mkdir()
            home, temporary = self._folder / "home", self._folder / "tmp"
            for link in (home, temporary):
                link.symlink_to(empty, target_is_directory=True)
            environment = confined_environment(home, temporary, network=False, inherited=self._inherited)
            self._server = ForkServer(
                "worker.attempt.warm_job:run",
                preload=_PRELOADED,
                environment={**environment, **_TEMPLATE_VARIABLES},
                scratch=self._folder,
            )
        return self._server


class _Program:
    """Process that was started as a program."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.pid = process.pid

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the exit code; None if it is still running."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def send_signal(self, number: int) -> None:
        """Send a signal if it is still running."""
        self._process.send_signal(number)

    def close(self) -> None:
        """Do nothing: `wait` has released it."""


class _Forked:
    """Process that a template forked."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.pid = child.pid()

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the exit code; None if it is still running."""
        try:
            return self._child.wait(seconds)
        except TimeoutError:
            return None
        except ForkServerError:
            # The template has ended, and the system has killed its children.
            return -signal.SIGKILL

    def send_signal(self, number: int) -> None:
        """Send a signal if it is still running."""
        self._child.send_signal(number)

    def close(self) -> None:
        """Close the connection to the template; it kills a process that has not ended."""
        self._child.close()
