"""Fair acceptance of connections between client addresses.

asyncio builds a transport and a protocol for every connection in the order of arrival, at about 0.2 ms each: a client
that opens three thousand connections at once delays all others by half a second. Here connections are accepted in bulk,
which costs a tenth of that; each address has a queue that is no longer than the number of connections it may have, and
the queues are served in turns.
"""

import asyncio
import errno
import logging
import socket
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

from rocket_cli.service.connections import LimitedState

_BACKLOG = 2048
# Connections accepted (10 microseconds each) and built (200 microseconds each) in one turn of the event loop.
_ACCEPTED_PER_TURN = 256
_BUILT_PER_TURN = 16
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_SECONDS_WITHOUT_RESOURCES = 1.0
_Connection = TypeVar("_Connection")
_log = logging.getLogger(__name__)


class WaitingConnections(Generic[_Connection]):
    """Queues of accepted connections, one per group of addresses, served in turns.

    Args:
        per_group: longest queue of a group; the group `None` has no limit.
    """

    def __init__(self, per_group: int) -> None:
        self._per_group = per_group
        self._queues: OrderedDict[str | None, deque[_Connection]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, group: str | None, connection: _Connection) -> _Connection | None:
        """Append a connection to its group's queue, and return the oldest one if the queue is too long."""
        queue = self._queues.setdefault(group, deque())
        queue.append(connection)
        if group is not None and len(queue) > self._per_group:
            return queue.popleft()
        self._count += 1
        return None

    def take(self) -> _Connection | None:
        """Remove and return the oldest connection of the group whose turn it is."""
        if not self._queues:
            return None
        group, queue = self._queues.popitem(last=False)
        connection = queue.popleft()
        if queue:
            self._queues[group] = queue
        self._count -= 1
        return connection


class Acceptor:
    """Accepts connections from a listening socket until it is closed; used from its event loop only.

    Args:
        listener: listening socket; closed with the acceptor.
        state: limits on connections.
        make_protocol: returns the protocol of a new connection.
    """

    def __init__(
        self, listener: socket.socket, state: LimitedState, make_protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._state = state
        self._make_protocol = make_protocol
        self._waiting: WaitingConnections[socket.socket] = WaitingConnections(state.limits.per_address)
        self._building: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._is_scheduled = False
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Stop listening, and close the connections that wait; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._listener)
        self._listener.close()
        while connection := self._waiting.take():
            connection.close()

    def _accept(self) -> None:
        for _ in range(min(_ACCEPTED_PER_TURN, self._state.limits.waiting - len(self._waiting))):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                _log.warning("cannot accept connections for now", extra={"reason": str(error)})
                self._pause()
                break
            self._enqueue(connection, address[0])
        self._schedule()

    def _enqueue(self, connection: socket.socket, address: str) -> None:
        replaced = self._waiting.add(self._state.group_of(address), connection)
        if replaced is not None:
            self._state.note("replaced")
            replaced.close()

    def _pause(self) -> None:
        # The socket remains readable: without a pause the event loop would be busy with it.
        self._loop.remove_reader(self._listener)
        self._loop.call_later(_SECONDS_WITHOUT_RESOURCES, self._resume)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _schedule(self) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._build_some)

    def _build_some(self) -> None:
        self._is_scheduled = False
        for _ in range(_BUILT_PER_TURN):
            connection = self._waiting.take()
            if connection is None:
                return
            task = self._loop.create_task(self._build(connection))
            # The event loop keeps only weak references to tasks.
            self._building.add(task)
            task.add_done_callback(self._building.discard)
        self._schedule()

    async def _build(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError as error:
            _log.debug("a connection ended before it was set up", extra={"reason": str(error)})
            connection.close()
