"""Streams of a job's events, with reconnection."""

import json
from collections.abc import AsyncIterator

import httpx2

from rocket_client._retry import RetryBudget
from rocket_client._transport import Transport
from rocket_client._wire import Request, Wire
from rocket_client.errors import ClientError
from rocket_client.models import Event, Progress

# The server sends something every 15 seconds.
_LONGEST_SILENCE_SECONDS = 45.0
_STREAM_TYPE = "text/event-stream"


async def follow_events(
    transport: Transport, path: str, *, after: int, patience: float
) -> AsyncIterator[Event | Progress]:
    """Yield a job's events until it ends, each once and in order, and its progress whenever that changes.

    Args:
        transport: connection to the server.
        path: path of the job's events.
        after: number of the last event already seen.
        patience: seconds without an answer from the server before giving up.

    Raises:
        ClientError: the server cannot be reached for that long, or refuses.
    """
    retry_budget = RetryBudget(patience)
    while True:
        headers = {"Accept": _STREAM_TYPE, "Cache-Control": "no-store", "Last-Event-ID": str(after)}
        request = Request(method="GET", path=path, headers=headers, read_seconds=_LONGEST_SILENCE_SECONDS)
        error: ClientError
        try:
            async with transport.open(request) as response:
                async for message in transport.connections.messages(_event_source(transport.wire, response)):
                    retry_budget.reset()
                    if message.event == "done":
                        return
                    if message.event == "progress":
                        yield transport.wire.parse(message.data, Progress)
                    elif _has_number(message.data):
                        event = transport.wire.parse(message.data, Event)
                        after = event.id
                        yield event
            error = transport.wire.broken_off("the stream of events ended")
        except ClientError as failure:
            error = failure
        await transport.wait_out(error, retry_budget)


def _event_source(wire: Wire, response: httpx2.Response) -> httpx2.EventSource:
    """Return the messages of a response; raises UnexpectedAnswerError if it is not an event stream."""
    kind = response.headers.get("content-type", "")
    if kind.partition(";")[0].strip() != _STREAM_TYPE:
        raise wire.unexpected(f"{kind or 'no content type'} instead of a stream of events")
    return httpx2.EventSource(response)


def _has_number(data: str) -> bool:
    """Return whether a message is an event; of other kinds are those that a newer server may send."""
    try:
        body = json.loads(data)
    except ValueError:
        return False
    return isinstance(body, dict) and "id" in body
