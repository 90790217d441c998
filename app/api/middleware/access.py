"""Access control: every request is checked here before anything else handles it.

Checked in this order: whether the request is meant for this service (`Host`), whether a foreign web page sent it
(`Origin`), who sent it (`Authorization`), the rate limit, and the scopes of the key. Paths that are not listed as
public need a caller, whether they exist or not.
"""

import re
from http import HTTPStatus

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from app.api.middleware.forwarding import may_be_local
from app.api.paths import SESSION_COOKIE, is_page, is_public
from app.services import access
from app.services.access import Caller
from app.services.context import Context
from app.services.proxies import client_group
from app.services.rate_limits import RateLimiter
from app.shared.errors import PermissionDeniedError, UnauthenticatedError
from app.shared.repositories import keys

REFUSALS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.MISDIRECTED_REQUEST, HTTPStatus.TOO_MANY_REQUESTS)
"""Statuses that any request may get from this middleware."""

_UNCOUNTED_PATHS = frozenset({"/healthz", "/readyz"})
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_OWN_SITES = frozenset({"same-origin", "none"})
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?", re.IGNORECASE)
_PROXIED = (
    "this request came through a proxy and has no API key; create one with `rocket admin keys create TENANT` and send "
    "it as `Authorization: Bearer rk_...`; the operator can name the proxy's address in ROCKET_TRUSTED_PROXIES"
)


class AccessMiddleware:
    """Middleware that admits permitted requests and stores their caller in the request's state.

    Args:
        app: the next application.
        context: the service.
        address: IP address or name that the service listens on.
    """

    def __init__(self, app: ASGIApp, *, context: Context, address: str) -> None:
        self._app = app
        self._database = context.database
        self._limiter = RateLimiter(context.settings)
        self._is_loopback = access.is_loopback(address)
        self._names = context.settings.hosts | {address.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host = self._check_own_host(scope, headers)
            _check_own_origin(scope["method"], headers, host)
            scope.setdefault("state", {})["caller"] = await self._find_caller(scope, headers)
        elif scope["type"] != "lifespan":
            # WebSockets are not supported, and must not bypass the access checks.
            await WebSocketClose()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_own_host(self, scope: Scope, headers: Headers) -> str:
        """Return the `Host` header; refuse names that are not this server's (DNS rebinding)."""
        sent = headers.getlist("host")
        match = _HOST.fullmatch(sent[0]) if len(sent) == 1 else None
        if match is not None:
            name = match[1].strip("[]").lower()
            if name == "localhost" or name in self._names or access.is_loopback_ip(name) or _is_own_ip(scope, name):
                return sent[0].lower()
        raise HTTPException(
            HTTPStatus.MISDIRECTED_REQUEST,
            "this server does not accept requests for this host name; its operator can add it to ROCKET_ALLOWED_HOSTS",
        )

    async def _find_caller(self, scope: Scope, headers: Headers) -> Caller | None:
        """Return the sender of a request; None for public paths."""
        if scope["path"] in _UNCOUNTED_PATHS and is_public(scope["method"], scope["path"]):
            # Without a thread: liveness is checked above all when all threads are busy.
            return None
        return await run_in_threadpool(self._admit, scope, headers)

    def _admit(self, scope: Scope, headers: Headers) -> Caller | None:
        method, path = scope["method"], scope["path"]
        address = scope["client"][0] if scope.get("client") else ""
        if is_public(method, path):
            self._limiter.count_request(_network(address))
            if method == "POST":
                # Count sign-ins as failures: only clients that guess keys send many.
                self._limiter.count_failure(_network(address))
            return None
        authorization = headers.get("authorization")
        is_on_loopback = self._is_loopback and access.is_loopback_ip(address)
        try:
            caller = self._find_signed_in(method, path, headers)
            if caller is None:
                if authorization is None and is_on_loopback and not may_be_local(scope):
                    raise UnauthenticatedError(_PROXIED)
                caller = access.authenticate(self._database, authorization, is_local=is_on_loopback)
        except UnauthenticatedError:
            # Only failing requests count against an address: a valid key is admitted, however many others guess.
            if authorization is None:
                self._limiter.count_request(_network(address))
            else:
                self._limiter.count_failure(_network(address))
            raise
        who = _network(address) if caller.key_id is None else f"tenant {caller.tenant}"
        self._limiter.count_request(who, is_submission=_is_submission(method, path))
        caller.check_scope(_scope_for(method, path))
        return caller

    def _find_signed_in(self, method: str, path: str, headers: Headers) -> Caller | None:
        """Return the caller of a page session.

        The cookie counts for pages and for safe methods elsewhere, as a browser sends it by itself.
        """
        cookie = cookie_parser(headers.get("cookie", "")).get(SESSION_COOKIE)
        if not cookie or headers.get("authorization") is not None:
            return None
        if method not in _SAFE_METHODS and not is_page(path):
            return None
        return access.authenticate_session(self._database, cookie)


def _check_own_origin(method: str, headers: Headers, host: str) -> None:
    """Refuse cross-origin requests of a browser; other clients send neither header."""
    if method in _SAFE_METHODS:
        return
    origins = headers.getlist("origin")
    is_own = all(origin.lower().partition("://")[2] == host for origin in origins)
    if not is_own or headers.get("sec-fetch-site", "none") not in _OWN_SITES:
        raise PermissionDeniedError("requests from web pages of another origin are not allowed")


def _is_own_ip(scope: Scope, name: str) -> bool:
    # A service that listens on all addresses accepts the address of this connection as its name.
    named = access.parse_ip(name)
    return named is not None and bool(scope.get("server")) and named == access.parse_ip(str(scope["server"][0]))


def _scope_for(method: str, path: str) -> keys.Scope:
    if path == "/metrics" or path.startswith("/metrics/"):
        # Metrics are about the whole service, not about a tenant.
        return "metrics"
    return "read" if method in _SAFE_METHODS else "write"


def _is_submission(method: str, path: str) -> bool:
    # Jobs, retries, estimates and uploads. Cancelling is always cheap, and so are the previews requested while a form
    # is filled in.
    return method == "POST" and not path.endswith(("/cancel", "/preview"))


def _network(address: str) -> str:
    return f"address {client_group(address)}"
