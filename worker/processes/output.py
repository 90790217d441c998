"""What confined processes print, as lines of this process's log.

They log JSON lines to standard error, and libraries print to it. Nothing of that is trusted: names of loggers get a
prefix that no other line has, anything that is not a logged line becomes the message of a warning, fields other than
those below are dropped, and so is what exceeds the limits.
"""

import logging
import threading
import time
from collections import deque
from typing import IO, Annotated, Literal

from pydantic import ConfigDict, Field, ValidationError

from rocket_core.schema import FrozenModel

MOST_BYTES = 2**22
"""Most bytes that a process may print into the log."""
# Bytes that the time and the fields of a line take at least, so that empty lines count.
_LINE_COST = 200
_BYTES_PER_SECOND = 2**14
_BURST_BYTES = 2**18
# Output of a process that is kept to find out why it died.
_LAST_LINES = 20
_LINE_BYTES = 2**16
# Upper bound on waiting until all output of a process is read.
_DRAIN_SECONDS = 10.0
_PREFIX = "confined"
_log = logging.getLogger(__name__)


class Output:
    """Reader of a process's output, which never blocks it; logs the lines, and keeps the last of them.

    Args:
        stream: what the process prints.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lines: deque[bytes] = deque(maxlen=_LAST_LINES)
        self._thread = threading.Thread(target=self._read, name="output", daemon=True)
        self._thread.start()

    def finish(self) -> str:
        """Wait until everything is read, and return the last lines."""
        self._thread.join(_DRAIN_SECONDS)
        if not self._thread.is_alive():
            self._stream.close()
        return b"".join(self._lines).decode(errors="replace")

    def _read(self) -> None:
        allowance, dropped = Allowance(), 0
        while line := self._stream.readline(_LINE_BYTES):
            self._lines.append(line)
            if allowance.take(len(line) + _LINE_COST):
                _log_line(line)
            else:
                dropped += len(line)
        if dropped:
            _log.warning("dropped %d bytes that a process of the job printed, as it printed too much", dropped)


class Allowance:
    """Bytes that may still be taken: some at once, more as time passes, and a number in all."""

    def __init__(self) -> None:
        self._left = MOST_BYTES
        self._now = float(_BURST_BYTES)
        self._at = time.monotonic()

    def take(self, size: int) -> bool:
        """Return whether so many may be taken, which they are then."""
        at = time.monotonic()
        self._now = min(_BURST_BYTES, self._now + (at - self._at) * _BYTES_PER_SECOND)
        self._at = at
        if size > min(self._now, self._left):
            return False
        self._now -= size
        self._left -= size
        return True


class _Logged(FrozenModel):
    """A line of `app.shared.logging`."""

    model_config = ConfigDict(extra="ignore")

    level: Literal["debug", "info", "warning", "error", "critical"]
    logger: Annotated[str, Field(max_length=200)]
    message: str
    trace: str | None = None


def _log_line(line: bytes) -> None:
    name, text, trace = _PREFIX, line.decode(errors="replace").rstrip("\n"), None
    level = logging.WARNING
    try:
        logged = _Logged.model_validate_json(line)
    except ValidationError:
        pass
    else:
        name, text, trace = f"{_PREFIX}:{logged.logger}", logged.message, logged.trace
        level = logging.getLevelNamesMapping()[logged.level.upper()]
    if _log.isEnabledFor(level):
        record = {"name": name, "levelno": level, "levelname": logging.getLevelName(level), "msg": text}
        # Not by a logger of that name: loggers are never freed.
        _log.handle(logging.makeLogRecord(record if trace is None else record | {"trace": trace}))
