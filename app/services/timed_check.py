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
            if self._pending is None or self._pending.is_over:
                self._pending = _Asked(self._question)
            return self._pending


class _Asked(Generic[Answer]):
    def __init__(self, question: Callable[[], Answer]) -> None:
        self._question = question
        self._answer: Answer | None = None
        self._over = threading.Event()
        # A daemon, so that the process can end while a check hangs.
        threading.Thread(target=self._run, name="check", daemon=True).start()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def wait(self, seconds: float) -> Answer | None:
        self._over.wait(max(0.0, seconds))
        return self._answer

    def _run(self) -> None:
        try:
            self._answer = self._question()
        finally:
            self._over.set()
