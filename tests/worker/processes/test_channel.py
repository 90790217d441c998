import contextlib
import socket
import threading

import pytest
from pydantic import TypeAdapter

from worker.confined.messages import FROM_COMPUTE, Advanced, Finished
from worker.processes.channel import Channel, ChannelClosedError, ChannelError, Message


class Note(Message):
    text: str


NOTE = TypeAdapter(Note)


@pytest.fixture
def ends():
    """Yield two ends of a connection: a channel, and a socket that may send anything."""
    one, other = socket.socketpair()
    channel = Channel(one, max_line_bytes=2**20)
    with other:
        yield channel, other
    channel.close()


def test_messages_arrive_whole_and_in_order(ends):
    channel, other = ends
    texts = ["", "x" * 10**6, "line\nbreak", "ü"]
    sender = Channel(other)
    thread = threading.Thread(target=lambda: [sender.send(Note(text=text)) for text in texts])
    thread.start()
    assert [channel.receive(NOTE).text for _ in texts] == texts
    thread.join()


def test_receiving_has_a_timeout_and_keeps_partial_messages(ends):
    channel, other = ends
    assert channel.receive(NOTE, seconds=0.01) is None
    other.sendall(b'{"text": ')
    assert channel.receive(NOTE, seconds=0.01) is None
    other.sendall(b'"late"}\n')
    assert channel.receive(NOTE, seconds=10).text == "late"


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b'{"text": 1}',
        b'{"text": "a", "more": 1}',
        b'{"text": "a"',
        b'{"text": "\xff"}',
        b'{"text": "\\u0000"}',
        b'{"text": "\\ud800"}',
        b"[" * 10**5,
    ],
)
def test_invalid_messages_are_refused_without_their_text(ends, line):
    channel, other = ends
    other.sendall(line + b"\n")
    with pytest.raises(ChannelError) as caught:
        channel.receive(NOTE)
    assert "more" not in str(caught.value) or "Extra" in str(caught.value)


def test_an_overlong_line_is_refused_before_it_ends(ends):
    channel, other = ends

    def send():
        with contextlib.suppress(OSError):
            while True:
                other.sendall(b"x" * 2**16)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(ChannelError, match="bytes"):
        channel.receive(NOTE)
    channel.close()
    thread.join(30)
    assert not thread.is_alive()


def test_a_closed_end_is_detected(ends):
    channel, other = ends
    other.close()
    with pytest.raises(ChannelClosedError):
        channel.receive(NOTE)
    with pytest.raises(ChannelClosedError):
        channel.send(Note(text="x" * 10**6))


def test_the_kind_identifies_a_message(ends):
    channel, other = ends
    other.sendall(Finished().model_dump_json().encode() + b"\n" + b'{"kind":"finish"}\n')
    assert channel.receive(FROM_COMPUTE) == Finished()
    with pytest.raises(ChannelError):
        channel.receive(FROM_COMPUTE)


@pytest.mark.parametrize("fraction", [float("nan"), float("inf"), -0.1, 1.1])
def test_an_invalid_fraction_is_refused(fraction):
    with pytest.raises(ValueError, match="fraction"):
        Advanced(stage="calibrating", layer=None, fraction=fraction, seconds_left=None)
