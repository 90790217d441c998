"""The process of one model, seen from the measurement."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import TypeVar

import rocket_core
from rocket_core.schema import FrozenModel
from rocket_core.speed.messages import ANSWER, Failed

_LOOK_SECONDS = 0.1
# A package is found by listing the folder that it is in. A confined job may not list that of a checkout, where this
# library is, but may read the package itself, which is therefore loaded from its file.
_PROGRAM = """
import sys
from importlib.util import module_from_spec, spec_from_file_location

spec = spec_from_file_location("rocket_core", sys.argv[1])
sys.modules["rocket_core"] = package = module_from_spec(spec)
spec.loader.exec_module(package)
from rocket_core.speed.process import main

main(sys.argv[2:])
"""
_PACKAGE = str(Path(rocket_core.__file__).resolve())

Expected = TypeVar("Expected", bound=FrozenModel)


class ChildError(Exception):
    """The model cannot be measured; the message says why."""


class Child:
    """A running process.

    Args:
        environment: variables in addition to those of this process.
        check: called several times a second while an answer is awaited; may raise to stop the measurement.
    """

    def __init__(self, environment: Mapping[str, str], check: Callable[[], None]) -> None:
        self._check = check
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 # closed with the process
        source, self._requests = Pipe(duplex=False)
        self._answers, target = Pipe(duplex=False)
        with source, target:
            descriptors = (source.fileno(), target.fileno())
            # Ctrl-C is a matter of this process. The child inherits the mask; its own group would let it outlive
            # the job that it belongs to.
            unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter, module and arguments
                [sys.executable, "-P", "-c", _PROGRAM, _PACKAGE, *map(str, descriptors)],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=descriptors,
            )
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

    def ask(self, request: FrozenModel, expected: type[Expected]) -> Expected:
        """Send a request and return the answer.

        Raises:
            ChildError: the process cannot do it, or has died.
        """
        try:
            self._requests.send_bytes(request.model_dump_json().encode())
            while not self._answers.poll(_LOOK_SECONDS):
                self._check()
            answer = ANSWER.validate_json(self._answers.recv_bytes())
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise ChildError(self._death()) from None
        if isinstance(answer, Failed):
            raise ChildError(answer.reason)
        assert isinstance(answer, expected), "the process answers what it is asked"
        return answer

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
