"""Streams of a job's events, with reconnection."""

import json
from collections.abc import AsyncIterator, Iterator

import httpx2

from rocket_client._retry import RetryBudget
from rocket_client._transport import AsyncTransport, Transport
from rocket_client._wire import Request, Wire
from rocket_client.errors import ClientError
from rocket_client.models import Event, Progress

# The server sends something every 15 seconds.
_LONGEST_SILENCE_SECONDS = 45.0
_STREAM_TYPE = "text/event-stream"


def follow_events(transport: Transport, path: str, *, after: int, patience: float) -> Iterator[Event | Progress]:
    """Yield a job's events until it ends, each once and in order, and its progress whenever that changes.

    Args:
        transport: connection to the server.
        path: path of the job's events.
        after: number of the last event already seen.
        patience: seconds without an answer from the server before giving up.

    Raises:
        ClientError: the server cannot be reached for that long, or refuses.
    """
    stream = _Stream(transport, path, after=after, patience=patience)
    while True:
        error: ClientError
        try:
            with transport.open(stream.request()) as response:
                for message in stream.messages(response):
                    event = stream.receive(message)
                    if stream.is_done:
                        return
                    if event is not None:
                        yield event
            error = stream.broken_off()
        except ClientError as failure:
            error = failure
        transport.wait_out(error, stream.retry_budget)


async def follow_events_async(
    transport: AsyncTransport, path: str, *, after: int, patience: float
) -> AsyncIterator[Event | Progress]:
    """Do the same asynchronously."""
    stream = _Stream(transport, path, after=after, patience=patience)
    while True:
        error: ClientError
        try:
            async with transport.open(stream.request()) as response:
                async for message in stream.messages(response):
                    event = stream.receive(message)
                    if stream.is_done:
                        return
                    if event is not None:
                        yield event
            error = stream.broken_off()
        except ClientError as failure:
            error = failure
        await transport.wait_out(error, stream.retry_budget)


class _Stream:
    """State of an event stream: what has been received, and what to request next.

    Attributes:
        retry_budget: how much longer the server may be silent.
        is_done: whether the job has ended and all its events are received.
    """

    def __init__(self, wire: Wire, path: str, *, after: int, patience: float) -> None:
        self._wire = wire
        self._path = path
        self._after = after
        self.retry_budget = RetryBudget(patience)
        self.is_done = False

    def request(self) -> Request:
        """Return the request for the remaining events."""
        headers = {"Accept": _STREAM_TYPE, "Cache-Control": "no-store", "Last-Event-ID": str(self._after)}
        return Request(method="GET", path=self._path, headers=headers, read_seconds=_LONGEST_SILENCE_SECONDS)

    def messages(self, response: httpx2.Response) -> httpx2.EventSource:
        """Return the messages of a response; raises UnexpectedAnswerError if it is not an event stream."""
        kind = response.headers.get("content-type", "")
        if kind.partition(";")[0].strip() != _STREAM_TYPE:
            raise self._wire.unexpected(f"{kind or 'no content type'} instead of a stream of events")
        return httpx2.EventSource(response)

    def receive(self, message: httpx2.ServerSentEvent) -> Event | Progress | None:
        """Return the event or progress in a message; None for the last message and for unknown kinds of messages."""
        self.retry_budget.reset()
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
        """Return the error for a response that ends before the job does."""
        return self._wire.broken_off("the stream of events ended")


def _has_number(data: str) -> bool:
    try:
        body = json.loads(data)
    except ValueError:
        return False
    return isinstance(body, dict) and "id" in body
