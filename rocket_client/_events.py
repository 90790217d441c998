"""A job's events as they happen, over as many connections as it takes."""

import json
from collections.abc import AsyncIterator, Iterator

import httpx2

from rocket_client._retry import Patience
from rocket_client._transport import AsyncTransport, Transport
from rocket_client._wire import Request, Wire
from rocket_client.errors import ClientError
from rocket_client.models import Event, Progress

# The server says something every 15 seconds.
_LONGEST_SILENCE_SECONDS = 45.0
_STREAM_TYPE = "text/event-stream"


def follow_events(transport: Transport, path: str, *, after: int, patience: float) -> Iterator[Event | Progress]:
    """What happens to a job until it ends; events each once and in order, progress as it changes.

    Args:
        transport: the way to the server.
        path: of the job's events.
        after: number of the last event already seen.
        patience: seconds without a word from the server before giving up.

    Raises:
        ClientError: the server cannot be reached for that long, or refuses.
    """
    stream = _Stream(transport, path, after=after, patience=patience)
    while True:
        error: ClientError
        try:
            with transport.open(stream.request()) as response:
                for message in stream.messages(response):
                    told = stream.receive(message)
                    if stream.is_done:
                        return
                    if told is not None:
                        yield told
            error = stream.broken_off()
        except ClientError as failure:
            error = failure
        transport.wait_out(error, stream.left)


async def follow_events_async(
    transport: AsyncTransport, path: str, *, after: int, patience: float
) -> AsyncIterator[Event | Progress]:
    """The same, asynchronously."""
    stream = _Stream(transport, path, after=after, patience=patience)
    while True:
        error: ClientError
        try:
            async with transport.open(stream.request()) as response:
                async for message in stream.messages(response):
                    told = stream.receive(message)
                    if stream.is_done:
                        return
                    if told is not None:
                        yield told
            error = stream.broken_off()
        except ClientError as failure:
            error = failure
        await transport.wait_out(error, stream.left)


class _Stream:
    """What has been told so far, and what is to be asked for next.

    Attributes:
        left: how long the server may be silent yet.
        is_done: whether the job has ended, and all of it is told.
    """

    def __init__(self, wire: Wire, path: str, *, after: int, patience: float) -> None:
        self._wire = wire
        self._path = path
        self._after = after
        self.left = Patience(patience)
        self.is_done = False

    def request(self) -> Request:
        """Ask for what has not been told."""
        headers = {"Accept": _STREAM_TYPE, "Cache-Control": "no-store", "Last-Event-ID": str(self._after)}
        return Request(method="GET", path=self._path, headers=headers, read_seconds=_LONGEST_SILENCE_SECONDS)

    def messages(self, response: httpx2.Response) -> httpx2.EventSource:
        """The messages of an answer; raises UnexpectedAnswerError if it has none."""
        found = response.headers.get("content-type", "")
        if found.partition(";")[0].strip() != _STREAM_TYPE:
            raise self._wire.unexpected(f"{found or 'nothing'} where a stream of events was asked for")
        return httpx2.EventSource(response)

    def receive(self, message: httpx2.ServerSentEvent) -> Event | Progress | None:
        """What a message tells; None where a newer server tells of something that this client does not know."""
        self.left.renew()
        if message.event == "done":
            self.is_done = True
            return None
        if message.event == "progress":
            return self._wire.parse(message.data, Progress)
        if not _has_number(message.data):
            return None
        event = self._wire.parse(message.data, Event)
        self._after = event.id
        return event

    def broken_off(self) -> ClientError:
        """The error for an answer that ends before the job does."""
        return self._wire.broken_off("the stream of events ended")


def _has_number(data: str) -> bool:
    try:
        body = json.loads(data)
    except ValueError:
        return False
    return isinstance(body, dict) and "id" in body
