"""`/jobs/{id}/events`: a page of past events, or a stream of events as they happen.

The stream is one of the few asynchronous endpoints: it sleeps without a thread and queries the database in the pool.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from app.api.dependencies import CallerDep, ContextDep, JobId
from app.api.problems import problems
from app.api.resources import EventList, ProgressView
from app.api.serializers import event_view, progress_view
from app.api.streams import SECONDS_BETWEEN_LOOKS, Streams
from app.services import jobs
from app.services.access import Caller
from app.services.context import Context
from app.shared.errors import AppError
from app.shared.lifecycle import Status

router = APIRouter(prefix="/jobs", tags=["jobs"])

_STREAM_TYPE = EventSourceResponse.media_type
_PAGE = 200
# Proxies close connections that are silent for longer.
_KEEP_ALIVE_SECONDS = 15.0
_MAX_SEQUENCE = 2**31 - 1


class _CountedStream(EventSourceResponse):
    """A stream whose slot is freed when it ends, however it ends."""

    def __init__(self, content: AsyncIterator[bytes], streams: Streams, caller: Caller) -> None:
        # Buffering proxies would delay events.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(content, headers=headers)
        self._streams = streams
        self._caller = caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.release(self._caller)


@router.get(
    "/{job_id}/events",
    response_model=EventList,
    responses=problems(404, 422, 429) | {200: {"content": {_STREAM_TYPE: {"schema": {"type": "string"}}}}},
)
async def list_events(
    job_id: JobId,
    request: Request,
    context: ContextDep,
    caller: CallerDep,
    after: Annotated[
        int,
        Query(ge=0, le=_MAX_SEQUENCE, description="Number of an event: return only later ones; 0 starts at the first."),
    ] = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="Maximum number of events; a stream sends all.")] = 100,
    last_event_id: Annotated[
        int | None,
        Header(
            ge=0,
            le=_MAX_SEQUENCE,
            description="Number of the last event received, to resume a stream; takes precedence over `after`.",
        ),
    ] = None,
) -> EventList | Response:
    """List a job's events, oldest first; with `Accept: text/event-stream`, stream them until the job ends."""
    owner = caller.tenant
    page = await run_in_threadpool(jobs.list_events, context, owner, job_id, after=after, limit=limit)
    if _STREAM_TYPE in request.headers.get("accept", ""):
        streams: Streams = request.app.state.streams
        streams.acquire(caller)
        return _CountedStream(_follow(context, streams, owner, job_id, last_event_id or after), streams, caller)
    last = page.events[-1].sequence if page.events else None
    return EventList(data=[event_view(event) for event in page.events], has_more=page.has_more, last_id=last)


async def _follow(context: Context, streams: Streams, owner: str, job_id: str, after: int) -> AsyncIterator[bytes]:
    """Yield events as they happen, progress as it changes, and `done` at the end."""
    sent: ProgressView | None = None
    sent_at = time.monotonic()
    while not streams.are_closing:
        try:
            page = await run_in_threadpool(jobs.list_events, context, owner, job_id, after=after, limit=_PAGE)
        except AppError:
            # The response has started, so it can only end; the client reconnects and gets the error.
            return
        for event in page.events:
            yield _message(event.type, event_view(event), number=event.sequence)
            after = event.sequence
        progress = progress_view(page.job)
        if progress != sent:
            yield _message("progress", progress)
            sent, sent_at = progress, time.monotonic()
        if page.has_more:
            continue
        if Status(page.job.status).is_terminal:
            yield _message("done", progress)
            return
        if time.monotonic() - sent_at > _KEEP_ALIVE_SECONDS:
            yield KEEPALIVE_COMMENT
            sent_at = time.monotonic()
        await asyncio.sleep(min(SECONDS_BETWEEN_LOOKS, context.settings.poll_seconds))


def _message(kind: str, data: BaseModel, *, number: int | None = None) -> bytes:
    # Progress has no number: a client that reconnects gets the current progress anyway.
    return format_sse_event(event=kind, data_str=data.model_dump_json(), id=None if number is None else str(number))
