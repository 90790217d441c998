"""Headers of everything that a link shows to people without a key, errors included."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.paths import is_shared


class SharedLinkMiddleware:
    """Middleware that keeps the addresses of links from other sites and from search engines.

    Args:
        app: the next application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http" or not is_shared(scope["path"]):
            await self._app(scope, receive, send)
            return

        async def unlisted(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Referrer-Policy"] = "no-referrer"
                headers["X-Robots-Tag"] = "noindex"
                # Once a link has ended, no cache may show what it showed.
                headers["Cache-Control"] = "no-store"
            await send(message)

        await self._app(scope, receive, unlisted)
