"""A template process from which others are forked in milliseconds; it imports what they need and starts no threads.

The template imports its modules once, in an environment that its client chooses, and forks a child per request; a
child calls one function with the descriptors that came with the request. Children inherit nothing of the client's
memory, environment or descriptors. All of them end with the client, however it ends: the template when its socket is
closed, a child when its own socket is closed, or through the kernel (Linux) when the template has ended.

Requires `fork` and Unix sockets: Linux and macOS. Standard library only, so that the template is as small as possible.
"""

import atexit
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

# On a busy machine, a process with many imports takes seconds to start.
START_SECONDS = 60.0
_END_SECONDS = 5.0
MOST_DESCRIPTORS = 16
# Message of the template about a child: its process id, later its exit code; or, negative, why it could not be forked.
WORD = struct.Struct("!q")


class ForkServerError(Exception):
    """The template has ended, does not answer or cannot fork; a later request starts a new one where it has ended."""


class Child:
    """A forked process; closing it kills a process that is still running.

    Args:
        status: the socket on which the template reports about it.
    """

    def __init__(self, status: socket.socket) -> None:
        self._status = status
        self._pid: int | None = None
        self._code: int | None = None

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the process has started and again when it has ended."""
        return self._status.fileno()

    def pid(self, seconds: float = START_SECONDS) -> int:
        """Return the process id, once the template has forked.

        Args:
            seconds: how long to wait; a new template imports its modules first.

        Raises:
            ForkServerError: the template has ended, does not answer in time, or cannot fork.
        """
        if self._pid is None:
            try:
                pid = self._word(seconds)
            except TimeoutError as error:
                raise ForkServerError("the template process does not answer") from error
            if pid < 0:
                raise ForkServerError(f"cannot fork a process ({os.strerror(-pid)})")
            self._pid = pid
        return self._pid

    def wait(self, seconds: float | None = None) -> int:
        """Return the exit code, or the negative number of the signal that ended the process.

        Raises:
            TimeoutError: it is still running.
            ForkServerError: it could not be forked, or the template has ended, and all its children with it.
        """
        if self._code is None:
            self.pid()
            self._code = self._word(seconds)
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal if the process is still running; never to another process that has reused its id."""
        # The template sends it, as only the parent knows whether an id is still that of its child.
        with suppress(OSError):
            self._status.sendall(bytes([number]))

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Close the socket; the template kills the process if it is still running."""
        self._status.close()

    def _word(self, seconds: float | None) -> int:
        self._status.settimeout(seconds)
        word = b""
        try:
            while len(word) < WORD.size:
                part = self._status.recv(WORD.size - len(word))
                if not part:
                    raise ForkServerError("the template process has ended")
                word += part
        except ConnectionError as error:
            raise ForkServerError("the template process has ended") from error
        value: int = WORD.unpack(word)[0]
        return value


class ForkServer:
    """Starts processes from a template, which it starts when first needed and again when it has ended.

    Args:
        entry: `module:function`; a child calls it with the sequence of its descriptors, and exits with 0, or with 1
            and a traceback if it raises.
        preload: further modules for the template to import.
        environment: the full environment of the template and its children; only PYTHONPATH is added, so that they
            import from the same places as this process.
        scratch: a folder that the template removes when it ends, also when this process was killed.
    """

    def __init__(
        self, entry: str, *, preload: Sequence[str] = (), environment: Mapping[str, str], scratch: Path | None = None
    ) -> None:
        self._entry = entry
        self._scratch = scratch
        self._preload = tuple(preload)
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._template: subprocess.Popen[bytes] | None = None
        self._holders = 0

    @property
    def pid(self) -> int | None:
        """Process id of the template; None if none is running."""
        template = self._template
        return None if template is None or template.poll() is not None else template.pid

    def start(self) -> None:
        """Start the template, without waiting until it has imported its modules; no-op if it is running."""
        with self._lock:
            self._running()

    def hold(self) -> None:
        """Keep the template until `release` has been called as often."""
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        """Undo one `hold`; the last one ends the template and its children."""
        with self._lock:
            self._holders -= 1
            if self._holders <= 0:
                self._end()

    def fork(self, descriptors: Sequence[int] = ()) -> Child:
        """Request a child; `Child.pid` tells whether it could be created.

        Args:
            descriptors: descriptors that the child gets duplicates of, at most `MOST_DESCRIPTORS` - 1.

        Raises:
            ForkServerError: no template can be reached.
        """
        with self._lock:
            for _attempt in range(2):
                control = self._running()
                ours, theirs = socket.socketpair()
                try:
                    socket.send_fds(control, [b"\0"], [theirs.fileno(), *descriptors])
                    return Child(ours)
                except OSError:
                    # The template has ended since the check; a new one is tried once.
                    ours.close()
                    self._end()
                finally:
                    theirs.close()
        raise ForkServerError("the template process ends at once; see what it has written to standard error")

    def close(self) -> None:
        """End the template and all children, even while it is held; no-op if none is running."""
        with self._lock:
            self._end()

    def _running(self) -> socket.socket:
        if self._control is not None and self._template is not None and self._template.poll() is None:
            return self._control
        self._end()
        ours, theirs = socket.socketpair()
        ours.settimeout(START_SECONDS)
        paths = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
        program = [sys.executable, "-P", "-m", "app.shared.fork_template"]
        try:
            self._template = subprocess.Popen(  # noqa: S603  # our own interpreter and module
                [*program, str(theirs.fileno()), self._entry, str(self._scratch or ""), *self._preload],
                env={**self._environment, "PYTHONPATH": paths},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Not reached by the terminal's Ctrl-C: it ends with this process.
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise ForkServerError(f"cannot start a process ({os.strerror(error.errno or 0)})") from error
        finally:
            theirs.close()
        self._control = ours
        atexit.register(self.close)
        return ours

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._template is not None:
            try:
                self._template.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._template.kill()
                self._template.wait()
            self._template = None
            atexit.unregister(self.close)


def exit_after(work: Callable[[], None]) -> NoReturn:
    """Do the work of a forked process and exit as an interpreter would, but without its parent's exit handlers."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001  # nothing may return into the parent's code
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)
