"""Limits on the web server's connections: how many may be open, and how slow their clients may be.

uvicorn only closes connections that are idle after a response: a client that never completes the head of a request, or
never reads a response, keeps its descriptor indefinitely.
"""

import asyncio
import fcntl
import json
import logging
import resource
import struct
import termios
from collections import Counter, OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from typing import Literal

import h11
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from app.services.proxies import TrustedProxies, client_group
from app.shared.settings import Settings

# Descriptors for purposes other than connections: database, files that are sent and received, pipes of jobs.
_RESERVED_DESCRIPTORS = 256
# Limited because a connection also takes about 40 KiB of memory.
_MOST_CONNECTIONS = 4096
_MOST_WAITING = 1024
_MOST_DESCRIPTORS = 2**16
_SECONDS_BETWEEN_REPORTS = 5.0
_log = logging.getLogger(__name__)

Reason = Literal["head_deadline", "not_read", "replaced", "refused"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A response sent without the application.

    Attributes:
        status: HTTP status.
        code: stable code of the problem document.
        detail: what is wrong and what to do.
    """

    status: HTTPStatus
    code: str
    detail: str


_ADDRESS_FULL = Refusal(
    status=HTTPStatus.TOO_MANY_REQUESTS,
    code="quota_exceeded",
    detail="too many connections are open from your address; close some, or reuse them",
)
_SERVER_FULL = Refusal(
    status=HTTPStatus.SERVICE_UNAVAILABLE,
    code="service_unavailable",
    detail="all connections of this server are in use; try again later",
)
_HEAD_LATE = Refusal(
    status=HTTPStatus.REQUEST_TIMEOUT,
    code="request_timeout",
    detail="the head of the request did not arrive in time; send it again on a new connection",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on the clients of a server.

    Attributes:
        head_seconds: time for the head of a request, from connecting or from its first byte.
        send_seconds: time without progress in sending a response.
        per_address: most open connections of one client address.
        total: most open connections of all clients.
        waiting: most accepted connections that are not set up yet.
        exempt: addresses that `per_address` does not apply to.
    """

    head_seconds: float
    send_seconds: float
    per_address: int
    total: int
    waiting: int
    exempt: TrustedProxies


def choose_limits(settings: Settings) -> Limits:
    """Raise the limit on open files as far as this process may, and derive the number of connections from it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    descriptors = _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    total = max(1, min(_MOST_CONNECTIONS, descriptors - min(_RESERVED_DESCRIPTORS, descriptors // 2)))
    return Limits(
        head_seconds=settings.head_seconds,
        send_seconds=settings.send_seconds,
        # However small the total is, one address must not take all connections.
        per_address=min(settings.max_connections_per_address, max(1, total // 2)),
        total=total,
        waiting=max(1, min(_MOST_WAITING, (descriptors - total) // 2)),
        exempt=TrustedProxies(settings.proxies),
    )


class LimitedState(ServerState):
    """State of a server with its open connections; used from its event loop only.

    Args:
        limits: limits on its clients.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.limits = limits
        self._groups: dict[LimitedProtocol, str | None] = {}
        self._open_per_group: Counter[str | None] = Counter()
        # Idle connections, oldest first: all of them, and by group.
        self._idle: OrderedDict[LimitedProtocol, None] = OrderedDict()
        self._idle_per_group: dict[str | None, OrderedDict[LimitedProtocol, None]] = {}
        self._closed: Counter[Reason] = Counter()
        # Parsing an address takes longer than accepting its connection.
        self.group_of = lru_cache(maxsize=_MOST_CONNECTIONS)(self._group_of)

    def admit(self, connection: "LimitedProtocol", address: str) -> Refusal | None:
        """Count a new connection; if there are too many, the oldest idle one is closed to make room.

        Returns:
            The refusal, if there are too many connections and all are busy; otherwise None.
        """
        group = self.group_of(address)
        if group is not None and self._open_per_group[group] >= self.limits.per_address:
            refusal, idle = _ADDRESS_FULL, self._idle_per_group.get(group)
        elif len(self._groups) >= self.limits.total:
            refusal, idle = _SERVER_FULL, self._idle
        else:
            self._count(connection, group)
            return None
        if not idle:
            self.note("refused")
            return refusal
        oldest = next(iter(idle))
        # No longer counted, although it ends only in the event loop's next turn.
        self.forget(oldest)
        self.note("replaced")
        oldest.transport.abort()
        self._count(connection, group)
        return None

    def forget(self, connection: "LimitedProtocol") -> None:
        """Stop counting a connection; idempotent."""
        if connection in self._groups:
            self.mark_busy(connection)
            group = self._groups.pop(connection)
            self._open_per_group[group] -= 1
            if not self._open_per_group[group]:
                del self._open_per_group[group]

    def mark_busy(self, connection: "LimitedProtocol") -> None:
        """Keep a connection from being closed to make room; idempotent."""
        if connection in self._idle:
            del self._idle[connection]
            group = self._groups[connection]
            del self._idle_per_group[group][connection]
            if not self._idle_per_group[group]:
                del self._idle_per_group[group]

    def mark_idle(self, connection: "LimitedProtocol") -> None:
        """Allow a connection to be closed to make room; one that is idle already keeps its age."""
        if connection in self._groups and connection not in self._idle:
            self._idle[connection] = None
            self._idle_per_group.setdefault(self._groups[connection], OrderedDict())[connection] = None

    def note(self, reason: Reason) -> None:
        """Count a connection that the server ends. Many share a log line, so that an attacker cannot flood the log."""
        if not self._closed:
            asyncio.get_running_loop().call_later(_SECONDS_BETWEEN_REPORTS, self._report)
        self._closed[reason] += 1

    def _group_of(self, address: str) -> str | None:
        return None if address in self.limits.exempt else client_group(address)

    def _report(self) -> None:
        counts: dict[str, int] = {str(name): count for name, count in self._closed.items()}
        self._closed.clear()
        _log.warning("connections closed by their limits", extra=counts | {"open": len(self._groups)})

    def _count(self, connection: "LimitedProtocol", group: str | None) -> None:
        self._groups[connection] = group
        self._open_per_group[group] += 1


class LimitedProtocol(H11Protocol):
    """A connection with deadlines: for the head of each request, and for progress in sending a response.

    The deadline for the body of a request is in the application, which knows how to answer.
    """

    server_state: LimitedState
    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the connection, or refuse it."""
        super().connection_made(transport)
        refusal = self.server_state.admit(self, self.client[0] if self.client else "")
        if refusal is not None:
            self._refuse(refusal)
            return
        # Pause with the first byte that the system does not accept, and resume once it has accepted all.
        transport.set_write_buffer_limits(high=0)
        self._update()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers."""
        self._cancel_head_timer()
        self._cancel_send_timer()
        self.server_state.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Start the deadline with the first byte of a head, and end it with its last."""
        super().data_received(data)
        self._update()
        if not self._is_answering() and self._head_timer is None:
            # This includes the rest of a body that was refused before it arrived.
            self._expect_head()

    def handle_events(self) -> None:
        """Close the connection after the response to a request whose body has two lengths (RFC 9112, 6.1).

        A proxy may have ended the body elsewhere, and what follows would be the request of another client.
        """
        super().handle_events()
        names = {name for name, _ in self.headers or ()}
        if {b"content-length", b"transfer-encoding"} <= names and CLOSE_HEADER not in self.headers:
            # The same list as that of the scope, which the response looks at.
            self.headers.append(CLOSE_HEADER)

    def on_response_complete(self) -> None:
        """Allow the connection to be closed to make room, unless the next request has arrived already."""
        super().on_response_complete()
        self._update()

    def pause_writing(self) -> None:
        """Start the deadline for a client that does not read."""
        super().pause_writing()
        self._unsent = self._count_unsent()
        self._cancel_send_timer()
        self._send_timer = self.loop.call_later(self.server_state.limits.send_seconds, self._on_send_deadline)
        self._update()

    def resume_writing(self) -> None:
        """End the deadline, as the client has read."""
        super().resume_writing()
        self._cancel_send_timer()
        self._update()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not valid HTTP, unless a response was started already."""
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def _should_upgrade(self) -> bool:
        # Web sockets are not supported; a request for one is answered like any other.
        return False

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _update(self) -> None:
        if self._is_answering():
            self._cancel_head_timer()
        if self._is_answering() or self.flow.write_paused or self.transport.is_closing():
            self.server_state.mark_busy(self)
        else:
            self.server_state.mark_idle(self)

    def _expect_head(self) -> None:
        if not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.server_state.limits.head_seconds, self._on_head_deadline)

    def _on_head_deadline(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        self.server_state.note("head_deadline")
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(_HEAD_LATE)
        else:
            # No request was started: an answer would be taken for that to the next request.
            self.transport.close()

    def _on_send_deadline(self) -> None:
        unsent = self._count_unsent()
        if unsent < self._unsent:
            self._unsent = unsent
            self._send_timer = self.loop.call_later(self.server_state.limits.send_seconds, self._on_send_deadline)
            return
        self.server_state.note("not_read")
        self.transport.abort()

    def _count_unsent(self) -> int:
        """Return the number of unacknowledged bytes, in this process and, where available, in the system's buffer."""
        here = self.transport.get_write_buffer_size()
        connection = self.transport.get_extra_info("socket")
        try:
            (queued,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))
        except OSError:
            return here
        return here + int(queued)

    def _refuse(self, refusal: Refusal) -> None:
        problem = {
            "type": f"urn:rocket:error:{refusal.code}",
            "title": refusal.status.phrase,
            "status": refusal.status.value,
            "detail": refusal.detail,
            "code": refusal.code,
            "request_id": None,
        }
        body = json.dumps(problem).encode()
        lines = (
            f"HTTP/1.1 {refusal.status.value} {refusal.status.phrase}",
            "Content-Type: application/problem+json",
            f"Content-Length: {len(body)}",
            "Connection: close",
            "\r\n",
        )
        self.transport.write("\r\n".join(lines).encode() + body)
        self.transport.close()

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _cancel_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
