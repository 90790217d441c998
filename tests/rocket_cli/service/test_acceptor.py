"""Connections accepted in turns between addresses, in whatever order they arrive."""

import errno
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_cli.service.acceptor import WaitingConnections

ARRIVALS = st.lists(st.sampled_from(["first", "second", "third", None]), max_size=40)


def take_all(waiting):
    taken = []
    while (connection := waiting.take()) is not None:
        taken.append(connection)
    return taken


@given(arrivals=ARRIVALS, per_group=st.integers(1, 5))
def test_no_connection_is_lost_and_each_group_keeps_its_order(arrivals, per_group):
    waiting = WaitingConnections(per_group)
    replaced = [waiting.add(group, (group, number)) for number, group in enumerate(arrivals)]
    dropped = {connection for connection in replaced if connection is not None}
    assert len(waiting) == len(arrivals) - len(dropped)
    taken = take_all(waiting)
    assert len(waiting) == 0
    for group in set(arrivals):
        numbers = [number for number, other in enumerate(arrivals) if other == group]
        left = numbers if group is None else numbers[-per_group:]
        assert [number for other, number in taken if other == group] == left
        assert {number for other, number in dropped if other == group} == set(numbers) - set(left)


@given(arrivals=ARRIVALS)
def test_groups_take_turns(arrivals):
    waiting = WaitingConnections(40)
    for number, group in enumerate(arrivals):
        waiting.add(group, (group, number))
    groups = [group for group, _ in take_all(waiting)]
    for start in range(len(groups)):
        left = groups[start:]
        assert len(set(left)) == len(set(left[: len(set(left))]))


def test_a_burst_from_one_address_delays_no_other(serve, dial):
    server = serve(max_connections_per_address=3)
    with server.stalled():
        burst = [dial(server) for _ in range(100)]
        other = dial(server, source="127.0.0.2")
        other.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert b"200 OK" in other.read()
    assert burst[-1].ask()[0] == 200
    assert all(connection.is_open() for connection in burst[-3:])
    assert all(connection.read() == b"" for connection in burst[:-3])


class WithoutDescriptors:
    """A listening socket that twice reports a lack of descriptors."""

    def __init__(self, listener):
        self._listener = listener
        self.refused = 0

    def accept(self):
        if self.refused < 2:
            self.refused += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def __getattr__(self, name):
        return getattr(self._listener, name)


def test_accepting_resumes_once_descriptors_are_available(serve, dial, monkeypatch):
    monkeypatch.setattr("rocket_cli.service.acceptor._SECONDS_WITHOUT_RESOURCES", 0.1)
    server = serve()
    (acceptor,) = server.server._acceptors
    acceptor._listener = WithoutDescriptors(acceptor._listener)
    assert dial(server).ask()[0] == 200
    assert acceptor._listener.refused == 2


def test_a_stopped_server_refuses_connections(serve):
    server = serve()
    server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address)
