"""The process of one model, seen from the measurement."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from rocket_core.schema import FrozenModel
from rocket_core.speed.messages import ANSWER
from rocket_core.system.child_process import ChildError, ChildProcess, Failed

_LOOK_SECONDS = 0.1

Expected = TypeVar("Expected", bound=FrozenModel)


class Child:
    """A running process that measures a model.

    Args:
        environment: variables in addition to those of this process.
        check: called several times a second while an answer is awaited; may raise to stop the measurement.
        module: what it runs.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        check: Callable[[], None],
        module: str = "rocket_core.speed.process",
    ) -> None:
        self._check = check
        self._process = ChildProcess(module, environment)

    def ask(self, request: FrozenModel, expected: type[Expected]) -> Expected:
        """Send a request and return the answer.

        Raises:
            ChildError: the process cannot do it, or has died.
        """
        self._process.send(request.model_dump_json().encode())
        while not self._process.poll(_LOOK_SECONDS):
            self._check()
        answer = ANSWER.validate_json(self._process.receive())
        if isinstance(answer, Failed):
            raise ChildError(answer.reason)
        assert isinstance(answer, expected), "the process answers what it is asked"
        return answer

    def close(self) -> None:
        """End the process at once."""
        self._process.close()
