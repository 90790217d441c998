"""Checks with a timeout, for dependencies that may hang."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class TimedCheck(Generic[Answer]):
    """A check that runs in its own thread and waits a limited time for the answer.

    A check that hangs is not started again before it has returned: however often it is requested, it costs one thread.

    Args:
        question: the function to call; it returns errors as answers.
    """

    def __init__(self, question: Callable[[], Answer]) -> None:
        self._question = question
        self._lock = threading.Lock()
        self._pending: _Asked[Answer] | None = None

    def ask(self, seconds: float) -> Answer | None:
        """Return the answer, or None if it does not arrive in time."""
        return self.start().wait(seconds)

    def start(self) -> "_Asked[Answer]":
        """Start without waiting; callers that ask while a question is pending share its answer."""
        with self._lock:
            if self._pending is None or not self._pending.is_alive():
                self._pending = _Asked(self._question)
            return self._pending


class _Asked(threading.Thread, Generic[Answer]):
    def __init__(self, question: Callable[[], Answer]) -> None:
        # A daemon, so that the process can end while a check hangs.
        super().__init__(name="check", daemon=True)
        self._question = question
        self._answer: Answer | None = None
        self.start()

    def run(self) -> None:
        self._answer = self._question()

    def wait(self, seconds: float) -> Answer | None:
        self.join(max(0.0, seconds))
        return self._answer
