"""A limit on the processor time of code that interprets untrusted files."""

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

# Multiples of the limit.
_KILLED_AT = 2.0
_AGAIN_AFTER = 0.25


@contextmanager
def time_limit(seconds: float, error: Exception) -> Iterator[None]:
    """Raise an error once the context has taken so much processor time; it must not be nested.

    The error interrupts Python, such as a template. Compiled code, such as a regular expression of a tokenizer, does
    not return to raise it: after twice the time the kernel ends the process with SIGPROF. There is no limit in a thread
    other than the main one, where Python handles no signals.

    Args:
        seconds: processor time of the whole process.
        error: what to raise.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise error

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGVTALRM, signal.signal(signal.SIGVTALRM, interrupt))
        stack.callback(signal.setitimer, signal.ITIMER_PROF, 0)
        stack.callback(signal.setitimer, signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, _KILLED_AT * seconds)
        # A library may catch the first error and continue.
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_AFTER * seconds)
        yield
