"""Middleware for every request: request ids, logging, and limits on the body's size and speed."""

import logging
import re
import secrets
import time
from collections.abc import Sequence
from http import HTTPStatus

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.ids import is_job_id
from app.shared.logging import log_context

REQUEST_ID = "X-Request-Id"
_LATE = "the request body did not arrive in time; retry over a faster connection or send less"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{8,64}")
_log = logging.getLogger(__name__)


class RequestIdMiddleware:
    """Middleware that gives each request an id, in its response and its log lines.

    Args:
        app: the next application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = sent if _REQUEST_ID.fullmatch(sent) else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id
        began = time.monotonic()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
                # Paths contain names that clients chose; the route does not.
                milliseconds = round(1000 * (time.monotonic() - began), 1)
                fields = {"method": scope["method"], "status": message["status"], "milliseconds": milliseconds}
                route = {"route": getattr(scope.get("route"), "path", None)}
                _log.info("request", extra=fields | route | _job(scope))
            await send(message)

        with log_context(request_id=request_id):
            await self._app(scope, receive, named)


def _job(scope: Scope) -> dict[str, str]:
    # Log only a well-formed id: the path is chosen by the client.
    job_id = scope.get("path_params", {}).get("job_id", "")
    return {"job_id": job_id} if is_job_id(job_id) else {}


class BodyLimitMiddleware:
    """Middleware that refuses bodies that are too large, by their declared and by their actual size.

    The framework's own limit responds with plain text; this one raises an error that becomes a problem document.

    Args:
        app: the next application.
        max_bytes: largest body accepted, in bytes.
        exceptions: methods and patterns of paths with other limits, which follow them.
    """

    def __init__(
        self, app: ASGIApp, *, max_bytes: int, exceptions: Sequence[tuple[str, re.Pattern[str], int]] = ()
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._exceptions = exceptions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._limit(scope["method"], scope["path"])
        announced = Headers(scope=scope).get("content-length", "0")
        total = int(announced) if announced.isdecimal() else 0
        arrived = 0

        async def counted() -> Message:
            nonlocal arrived
            if total > most:
                raise _too_large(most)
            message = await receive()
            arrived += len(message.get("body", b""))
            if arrived > most:
                raise _too_large(most)
            return message

        await self._app(scope, counted, send)

    def _limit(self, method: str, path: str) -> int:
        limits = (most for of, pattern, most in self._exceptions if of == method and pattern.fullmatch(path))
        return next(limits, self._max_bytes)


class BodyDeadlineMiddleware:
    """Middleware that refuses bodies that arrive too slowly: after a silence, or below an average rate.

    Only time spent waiting for the client counts, and the rate only once half of the permitted silence has passed, so
    that small bodies may arrive slowly.

    Args:
        app: the next application.
        seconds: longest silence, in seconds.
        min_rate: minimum rate in bytes per second; 0 for none.
    """

    def __init__(self, app: ASGIApp, *, seconds: float, min_rate: int) -> None:
        self._app = app
        self._seconds = seconds
        self._min_rate = min_rate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_complete, has_begun = False, False
        arrived, waited = 0, 0.0

        async def in_time() -> Message:
            nonlocal is_complete, arrived, waited
            if is_complete:
                # Only the end of the connection is still awaited.
                return await receive()
            began = time.monotonic()
            with anyio.move_on_after(self._patience(arrived, waited)) as waiting:
                message = await receive()
            waited += time.monotonic() - began
            if not waiting.cancelled_caught:
                arrived += len(message.get("body", b""))
                is_complete = not message.get("more_body", False)
                return message
            is_complete = True
            if has_begun:
                # Too late for another response; the reader of the body ends this one.
                return {"type": "http.disconnect"}
            raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, _LATE, headers={"Connection": "close"})

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = has_begun or message["type"] == "http.response.start"
            await send(message)

        await self._app(scope, in_time, watched)

    def _patience(self, arrived: int, waited: float) -> float:
        if not self._min_rate:
            return self._seconds
        return min(self._seconds, max(self._seconds / 2, arrived / self._min_rate) - waited)


def _too_large(most: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {most} bytes; send less")
