"""`Prefer: wait=n` (RFC 7240): a response once the job has ended, or after n seconds.

Like event streams, waiting requests sleep without a thread and are limited; beyond the limit, a request does not wait.
"""

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Annotated

from fastapi import Depends, Header, Request, Response
from fastapi.concurrency import run_in_threadpool

from app.api.streams import SECONDS_BETWEEN_LOOKS, Streams
from app.services import jobs
from app.services.access import Caller
from app.services.context import Context
from app.shared.errors import AppError, TooManyStreamsError
from app.shared.lifecycle import Status
from app.shared.models import Job

MAX_WAIT_SECONDS = 60
# Names are case-insensitive, a value may be quoted, and the first of several counts.
_WAIT = re.compile(r'wait\s*=\s*"?(\d{1,6})"?\s*(?:;.*)?', re.IGNORECASE)


def _wait(
    request: Request,
    prefer: Annotated[
        str | None, Header(description="`wait=n`: respond once the job has ended, or after n seconds, at most 60.")
    ] = None,
) -> int:
    # Declared as one string, which is what most clients send; it may come in several header lines.
    return 0 if prefer is None else _seconds_to_wait(request.headers.getlist("prefer"))


def _seconds_to_wait(lines: Sequence[str]) -> int:
    preferences = (part.strip() for line in lines for part in line.split(","))
    seconds = next((match[1] for part in preferences if (match := _WAIT.fullmatch(part))), "0")
    return min(int(seconds), MAX_WAIT_SECONDS)


WaitDep = Annotated[int, Depends(_wait)]


async def wait_for_end(request: Request, response: Response, context: Context, job: Job, seconds: int) -> Job:
    """Return the job once it has ended, or as it is after some seconds; at once if no slot to wait is free.

    Args:
        request: the request to respond to; waiting ends when its client disconnects.
        response: gets `Preference-Applied`.
        context: the service.
        job: the job as last read.
        seconds: how long to wait; 0 does not wait.
    """
    streams: Streams = request.app.state.streams
    caller = request.state.caller
    assert isinstance(caller, Caller)
    if seconds == 0:
        return job
    try:
        streams.acquire(caller)
    except TooManyStreamsError:
        return job
    response.headers["Preference-Applied"] = f"wait={seconds}"
    deadline = time.monotonic() + seconds
    pause = min(SECONDS_BETWEEN_LOOKS, context.settings.poll_seconds)
    try:
        while not Status(job.status).is_terminal and not streams.are_closing:
            left = deadline - time.monotonic()
            if left <= 0 or await request.is_disconnected():
                break
            await asyncio.sleep(min(pause, left))
            job = await run_in_threadpool(jobs.get_job, context, job.owner, job.id)
    except AppError:
        # The job existed a moment ago; even its loss does not make the client's submission fail.
        return job
    finally:
        streams.release(caller)
    return job
