"""Processes of an attempt that bubblewrap starts."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.shared.confinement import Sandbox, bubblewrap_command
from worker.processes.children import ChildProcess

# In its own namespace, a process is its parent's only as number 0.
_PARENT = "0"
_SIGNAL_BASE = 128


class WrappedProcess:
    """The process that bubblewrap has started, and that ends with it.

    Args:
        wrapper: bubblewrap.
        pid: id of the process, outside of its namespace.
    """

    def __init__(self, wrapper: "subprocess.Popen[bytes]", pid: int) -> None:
        self._wrapper = wrapper
        self.pid = pid

    @property
    def returncode(self) -> int | None:
        """Exit code, or the negative number of the signal that ended it; None while it is running."""
        code = self._wrapper.returncode
        # As a shell does, bubblewrap reports signals by other numbers.
        return code if code is None or code <= _SIGNAL_BASE else _SIGNAL_BASE - code

    def send_signal(self, sig: int, /) -> None:
        """Send a signal if it is still running."""
        if self._wrapper.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """Kill bubblewrap, with which the kernel kills the whole namespace."""
        self._wrapper.kill()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raise `subprocess.TimeoutExpired` after the timeout."""
        self._wrapper.wait(timeout)
        assert self.returncode is not None
        return self.returncode


def start_in_bubblewrap(
    program: Sequence[str], environment: Mapping[str, str], name: str, sandbox: Sandbox
) -> ChildProcess:
    """Start a process that imports what it needs, in its own namespaces; a `worker.processes.children.Launcher`."""
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    with theirs:
        wrapper = subprocess.Popen(  # noqa: S603  # bubblewrap, our own interpreter, module and arguments
            [
                *bubblewrap_command(sandbox, folder=Path.cwd(), info=writer),
                *(sys.executable, "-P", *program, str(theirs.fileno()), _PARENT, name),
            ],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(), writer),
        )
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as info:
        told = info.read()
    assert wrapper.stdout is not None
    try:
        pid = int(json.loads(told)["child-pid"])
    except (ValueError, KeyError):
        wrapper.send_signal(signal.SIGKILL)
        with wrapper.stdout as output:
            raise OSError(f"bubblewrap: {output.read().decode(errors='replace').strip()}") from None
    return ChildProcess(WrappedProcess(wrapper, pid), ours, wrapper.stdout)
