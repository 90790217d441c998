"""A job's events as they happen, over as many connections as it takes."""

import json
from collections.abc import Iterator

import httpx2

from rocket_client.backoff import Patience
from rocket_client.errors import ClientError, ServerUnreachableError
from rocket_client.resources import Event, Progress
from rocket_client.transport import Transport

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
    left = Patience(patience)
    while True:
        error: ClientError
        try:
            headers = {"Accept": _STREAM_TYPE, "Cache-Control": "no-store", "Last-Event-ID": str(after)}
            with transport.open("GET", path, headers=headers, read_seconds=_LONGEST_SILENCE_SECONDS) as response:
                for message in _messages(transport, response):
                    left.renew()
                    if message.event == "done":
                        return
                    told = _resource(transport, message)
                    if isinstance(told, Event):
                        after = told.id
                    if told is not None:
                        yield told
            error = ServerUnreachableError(transport.server, "the stream of events ended", may_have_arrived=True)
        except ClientError as failure:
            error = failure
        transport.wait_out(error, left)


def _messages(transport: Transport, response: httpx2.Response) -> Iterator[httpx2.ServerSentEvent]:
    found = response.headers.get("content-type", "")
    if found.partition(";")[0].strip() != _STREAM_TYPE:
        raise transport.unexpected(f"{found or 'nothing'} where a stream of events was asked for")
    yield from httpx2.EventSource(response)


def _resource(transport: Transport, message: httpx2.ServerSentEvent) -> Event | Progress | None:
    """What a message tells; None where a newer server tells of something that this client does not know."""
    if message.event == "progress":
        return transport.parse(message.data, Progress)
    return transport.parse(message.data, Event) if _has_number(message.data) else None


def _has_number(data: str) -> bool:
    try:
        body = json.loads(data)
    except ValueError:
        return False
    return isinstance(body, dict) and "id" in body
