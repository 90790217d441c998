"""Asking what may hang."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class Probe(Generic[Answer]):
    """Asks a question in a thread of its own and waits only so long for the answer.

    A question that hangs is not asked again before it has come back: however often somebody asks, it costs one thread.

    Args:
        question: what is asked; it answers errors, too.
    """

    def __init__(self, question: Callable[[], Answer]) -> None:
        self._question = question
        self._lock = threading.Lock()
        self._pending: _Asked[Answer] | None = None

    def ask(self, seconds: float) -> Answer | None:
        """The answer, or None if it does not come in time."""
        return self.begin().wait(seconds)

    def begin(self) -> "_Asked[Answer]":
        """Asks without waiting; whoever asks while a question is open shares its answer."""
        with self._lock:
            if self._pending is None or self._pending.is_over:
                self._pending = _Asked(self._question)
            return self._pending


class _Asked(Generic[Answer]):
    def __init__(self, question: Callable[[], Answer]) -> None:
        self._question = question
        self._answer: Answer | None = None
        self._over = threading.Event()
        # A daemon, so that a process can end while something hangs.
        threading.Thread(target=self._run, name="probe", daemon=True).start()

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
