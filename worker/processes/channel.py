"""JSON lines between a job's attempt and the processes that it starts.

Neither end trusts the other: a line has a limited length and holds one message of a known kind with known fields.
"""

import select
import socket
import time
from typing import TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rocket_core.schema import FrozenModel

# Enough for the profile of a model with tens of thousands of layers, and as much as Postgres stores in a column.
MAX_LINE_BYTES = 2**28
_CHUNK_BYTES = 2**18
_MILLISECONDS = 1000

Received = TypeVar("Received")


class Message(FrozenModel):
    """A message from one process to the other."""

    model_config = ConfigDict(hide_input_in_errors=True)


class ChannelError(Exception):
    """The other process sent something that is not a message."""


class ChannelClosedError(ChannelError):
    """The other process closed its end, usually because it exited."""


class Channel:
    """One end of a connection.

    Args:
        connection: a connected stream socket; the channel closes it.
        max_line_bytes: length of the longest line that is read.
    """

    def __init__(self, connection: socket.socket, *, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._connection = connection
        self._max_line_bytes = max_line_bytes
        self._received = bytearray()
        # The bytes before this position contain no line break.
        self._searched = 0

    def send(self, message: Message) -> None:
        """Send a message, and block while the other process does not read.

        Raises:
            ChannelClosedError: the other end is closed.
        """
        try:
            self._connection.sendall(message.model_dump_json().encode() + b"\n")
        except OSError as error:
            raise ChannelClosedError("the other end is closed") from error

    def receive(self, kinds: TypeAdapter[Received], *, seconds: float | None = None) -> Received | None:
        """Return the next message.

        Args:
            kinds: the messages that are accepted.
            seconds: timeout; None waits indefinitely.

        Returns:
            The message; None if none arrived in time.

        Raises:
            ChannelClosedError: the other end is closed.
            ChannelError: the line is too long or not such a message.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while (line := self._next_line()) is None:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not self._wait(left):
                return None
            self._read()
        # Postgres cannot store the character 0.
        if b"\\u0000" in line:
            raise ChannelError("a message with the character 0")
        try:
            return kinds.validate_json(line)
        except ValidationError as error:
            problem = error.errors(include_input=False, include_url=False)[0]
            raise ChannelError(f"not a message: {problem['loc']}: {problem['msg']}") from None

    def close(self) -> None:
        """Close this end."""
        self._connection.close()

    def _next_line(self) -> bytes | None:
        end = self._received.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._received)
            return None
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        self._searched = 0
        return line

    def _wait(self, seconds: float | None) -> bool:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(None if seconds is None else seconds * _MILLISECONDS))

    def _read(self) -> None:
        if len(self._received) > self._max_line_bytes:
            raise ChannelError(f"a line of more than {self._max_line_bytes} bytes")
        try:
            chunk = self._connection.recv(_CHUNK_BYTES)
        except ConnectionError:
            chunk = b""
        if not chunk:
            raise ChannelClosedError("the other end is closed")
        self._received += chunk
