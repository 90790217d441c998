"""Request counts and durations."""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.shared.metrics import HttpMetrics

# Clients can invent other methods, each of which would become its own time series.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER_METHOD = "other"
_NO_ROUTE = "none"


class MetricsMiddleware:
    """Middleware that counts requests and measures the time to the first byte of their responses.

    Not the total time, as event streams and downloads last for as long as their clients like.

    Args:
        app: the next application.
        metrics: where requests are counted.
    """

    def __init__(self, app: ASGIApp, *, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        # An unexpected error becomes a response further out.
        status, seconds = 500, None

        async def timed(message: Message) -> None:
            nonlocal status, seconds
            if message["type"] == "http.response.start":
                status, seconds = message["status"], time.monotonic() - began
            await send(message)

        try:
            await self._app(scope, receive, timed)
        finally:
            self._metrics.count_request(
                method=scope["method"] if scope["method"] in _METHODS else _OTHER_METHOD,
                route=getattr(scope.get("route"), "path", _NO_ROUTE),
                status=status,
                seconds=time.monotonic() - began if seconds is None else seconds,
            )
