"""Processes of this library that a run starts, each connected with it by two pipes."""

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import rocket_core
from rocket_core.errors import RocketError
from rocket_core.schema import FrozenModel

# A package is found by listing the folder that it is in. A confined job may not list that of a checkout, where this
# library is, but may read the package itself, which is therefore loaded from its file.
_PROGRAM = """
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location

spec = spec_from_file_location("rocket_core", sys.argv[1])
sys.modules["rocket_core"] = package = module_from_spec(spec)
spec.loader.exec_module(package)
import_module(sys.argv[2]).main(sys.argv[3:])
"""
_PACKAGE = str(Path(rocket_core.__file__).resolve())


class ChildError(Exception):
    """A process cannot do what it is asked, or has died; the message says why."""


class ChildProcess:
    """A running process; it ends when this one does, in whatever way.

    Args:
        module: module whose `main` it calls, with the descriptors of two pipes, for requests and answers.
        environment: variables in addition to those of this process.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 # closed with the process
        source, self._requests = Pipe(duplex=False)
        self._answers, target = Pipe(duplex=False)
        with source, target:
            descriptors = (source.fileno(), target.fileno())
            # Ctrl-C is a matter of this process. The child inherits the mask; its own group would let it outlive
            # the job that it belongs to.
            unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter, module and arguments
                [sys.executable, "-P", "-c", _PROGRAM, _PACKAGE, module, *map(str, descriptors)],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=descriptors,
            )
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def send(self, request: bytes) -> None:
        """Send a request.

        Raises:
            ChildError: the process has died.
        """
        try:
            self._requests.send_bytes(request)
        except (BrokenPipeError, ConnectionResetError):
            raise ChildError(self._death()) from None

    def poll(self, seconds: float) -> bool:
        """Return whether there is an answer, or the process has died; wait for either."""
        return self._answers.poll(seconds)

    def receive(self) -> bytes:
        """Return the next answer.

        Raises:
            ChildError: the process has died.
        """
        try:
            return self._answers.recv_bytes()
        except (EOFError, ConnectionResetError):
            raise ChildError(self._death()) from None

    def close(self) -> None:
        """End the process at once."""
        self._requests.close()
        self._answers.close()
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _death(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.returncode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        said = f", after: {lines[-1].strip()}" if lines else ""
        killed = "; the system may have run out of memory" if code == -9 else ""
        return f"its process ended with {how}{killed}{said}"


class Failed(FrozenModel):
    """Answer of a process that cannot do what it is asked, and ends."""

    reason: str
    """what is wrong."""


def serve(arguments: Sequence[str], act: Callable[[Connection, Connection], None]) -> None:
    """Answer requests in such a process, which exits as soon as the other side closes the connection.

    Args:
        arguments: descriptors of two pipes, for requests and answers.
        act: given both, reads requests and sends answers. An error that it raises is sent as `Failed`.
    """
    requests, answers = (int(argument) for argument in arguments)
    threading.Thread(target=_exit_when_closed, args=(requests,), daemon=True).start()
    with Connection(requests, writable=False) as source, Connection(answers, readable=False) as target:
        try:
            act(source, target)
        except EOFError:
            return
        except RocketError as error:
            answer(target, Failed(reason=str(error)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other side continues without this process
            text = str(error).strip().partition("\n")[0]
            kind = type(error).__name__
            answer(target, Failed(reason=f"{kind}: {text}" if text else kind))


def answer(target: Connection, message: FrozenModel) -> None:
    """Send an answer, unless the other side has closed the connection."""
    with suppress(BrokenPipeError):
        target.send_bytes(message.model_dump_json().encode())


def _exit_when_closed(descriptor: int) -> None:
    # Without events to wait for, only the end of the connection is reported, and no request is taken away.
    waiting = select.poll()
    waiting.register(descriptor, 0)
    waiting.poll()
    os._exit(1)
