"""Client address and scheme of requests that come through a reverse proxy."""

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.services.access import is_loopback_ip
from app.services.proxies import TrustedProxies

HSTS = ("Strict-Transport-Security", "max-age=31536000")
"""Header of every response to a request over TLS."""

_FORWARDED_FOR = "x-forwarded-for"
_FORWARDED_PROTO = "x-forwarded-proto"
_FORWARDING_HEADERS = (
    _FORWARDED_FOR,
    _FORWARDED_PROTO,
    "x-forwarded-host",
    "x-forwarded-port",
    "x-forwarded-server",
    "x-real-ip",
    "forwarded",
    "via",
)
_SCHEMES = frozenset({"http", "https"})
_MAY_BE_LOCAL = "may_be_local"


class ForwardingMiddleware:
    """Middleware that sets a connection's address and scheme to those a trusted proxy reports for its client.

    Forwarding headers of all other peers are ignored, except that such a request is never considered local.

    Args:
        app: the next application.
        proxies: peers whose headers are accepted.
    """

    def __init__(self, app: ASGIApp, *, proxies: TrustedProxies) -> None:
        self._app = app
        self._proxies = proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        peer = str(scope["client"][0]) if scope.get("client") else ""
        if peer in self._proxies:
            hops = [hop.strip() for value in headers.getlist(_FORWARDED_FOR) for hop in value.split(",")]
            scope["client"] = (self._proxies.find_client(peer, hops), 0)
            scheme = ",".join(headers.getlist(_FORWARDED_PROTO)).rpartition(",")[2].strip().lower()
            if scheme in _SCHEMES:
                scope["scheme"] = scheme
            # Stricter than for the client's address: a proxy that just forwards the header must not admit a forged one.
            local = bool(hops) and all(map(is_loopback_ip, hops))
        else:
            local = not any(name in headers for name in _FORWARDING_HEADERS)
        scope.setdefault("state", {})[_MAY_BE_LOCAL] = local

        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start" and scope["scheme"] == "https":
                name, value = HSTS
                MutableHeaders(scope=message)[name] = value
            await send(message)

        await self._app(scope, receive, secured)


def may_be_local(scope: Scope) -> bool:
    """Return whether a request can come from a user of this machine, judging by its forwarding headers."""
    return bool(scope.get("state", {}).get(_MAY_BE_LOCAL, False))
