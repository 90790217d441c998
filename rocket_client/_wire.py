"""Requests and answers as they look on the wire, and what to do about errors. Sends nothing itself."""

import ipaddress
import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx2
from pydantic import BaseModel, ValidationError

from rocket_client._retry import Patience, retry_after_seconds
from rocket_client.errors import (
    ClientError,
    InvalidArgumentError,
    ProblemError,
    ServerUnreachableError,
    StoreUnreachableError,
    UnexpectedAnswerError,
)

Answer = TypeVar("Answer", bound=BaseModel)

_PROBLEM_TYPE = "application/problem+json"
_SILENCE_SECONDS = 30.0
_CONNECT_SECONDS = 5.0
_TEMPORARY_REDIRECT = 307
_ASK_LATER = frozenset({408, 429})
# What proxies answer for a server that does not.
_GATEWAY_STATUSES = frozenset({502, 503, 504})
# After these the request has not left this machine.
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is sent.

    Attributes:
        method: HTTP method.
        path: below the server's address.
        params: the query; those that are None are not sent.
        json: the body.
        file: the body as it is, read while it is sent.
        headers: further headers.
        is_repeatable: whether it does no harm that the server receives it twice.
        read_seconds: longest silence within the answer; None takes the usual one.
        may_redirect: whether the answer may be that the client is to look elsewhere.
    """

    method: str
    path: str
    params: Mapping[str, str | int | None] = field(default_factory=dict)
    json: Any = None
    file: Path | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_repeatable: bool = True
    read_seconds: float | None = None
    may_redirect: bool = False

    def arguments(self) -> dict[str, Any]:
        """What the HTTP library's `stream` takes, but for a file."""
        return {
            "method": self.method,
            "url": self.path,
            "params": {name: value for name, value in self.params.items() if value is not None},
            "headers": dict(self.headers),
            "timeout": timeout(self.read_seconds),
            "json": self.json,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Request, Generic[Answer]):
    """A request with the kind of resource that answers it."""

    answer: type[Answer]


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Why the client waits.

    Attributes:
        reason: what the server or the network says.
        seconds: until it asks again.
        seconds_left: until it gives up.
        has_answered: whether the server itself asks for time, and is not silent.
    """

    reason: str
    seconds: float
    seconds_left: float
    has_answered: bool = False


class _ProblemDocument(BaseModel):
    status: int | None = None
    code: str = "unknown"
    detail: str = ""
    title: str = ""
    param: str | None = None
    request_id: str | None = None


class KeyAuth(httpx2.Auth):
    """Adds an API key to what goes to the server, and to nothing else: a redirect may lead to somebody else's."""

    def __init__(self, key: str, server: httpx2.URL) -> None:
        self._header = f"Bearer {key}"
        self._origin = server.origin

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        """Add the header on the first and only round."""
        if request.url.origin == self._origin:
            request.headers["Authorization"] = self._header
        yield request


class Wire:
    """What is known of a server before anything is sent, and what its answers mean.

    Args:
        server: its address, `http://HOST:PORT`.
        api_key: what proves who asks; None where no server wants it.
        patience: seconds without an answer after which a request fails.
        on_wait: told before each wait.

    Attributes:
        options: what the HTTP library's client takes.

    Raises:
        InvalidArgumentError: the address is none, or the key cannot be one.
    """

    def __init__(
        self, server: str, *, patience: float, on_wait: Callable[[Waiting], None], api_key: str | None = None
    ) -> None:
        url = _server_url(server)
        self.server = server.rstrip("/")
        self.patience = patience
        self._on_wait = on_wait
        self.options: dict[str, Any] = {
            "base_url": url,
            "timeout": timeout(None),
            # A proxy of the environment cannot reach this machine's own loopback.
            "trust_env": not _is_loopback(url.host),
            "auth": None if api_key is None else KeyAuth(_usable_key(api_key), url),
        }

    def parse(self, text: str | bytes, kind: type[Answer]) -> Answer:
        """A resource from JSON; members that it does not know are ignored.

        Raises:
            UnexpectedAnswerError: it is none.
        """
        try:
            return kind.model_validate_json(text, extra="ignore")
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise self.unexpected(f"{kind.__name__}: {where or 'body'}: {first['msg']}") from error

    def unexpected(self, found: str) -> UnexpectedAnswerError:
        """The error for an answer that makes no sense."""
        return UnexpectedAnswerError(self.server, found)

    def broken_off(self, what: str) -> ServerUnreachableError:
        """The error for an answer that is too short."""
        return ServerUnreachableError(self.server, what, may_have_arrived=True)

    def unreachable(self, error: httpx2.RequestError) -> ServerUnreachableError:
        """What the HTTP library's error means."""
        arrived = not isinstance(error, _NOT_SENT)
        return ServerUnreachableError(self.server, _reason(error), may_have_arrived=arrived)

    def is_usable(self, request: Request, response: httpx2.Response) -> bool:
        """Whether an answer is what was asked for; otherwise it is to be read, and `refusal` says what it means."""
        return response.is_success or (request.may_redirect and is_redirect(response))

    def refusal(self, response: httpx2.Response) -> ClientError:
        """What an answer means, once read, that is not what was asked for."""
        status = response.status_code
        retry_after = retry_after_seconds(response.headers.get("retry-after"))
        if response.headers.get("content-type", "").partition(";")[0].strip() == _PROBLEM_TYPE:
            document = self.parse(response.content, _ProblemDocument)
            return ProblemError(
                status=status,
                code=document.code,
                detail=document.detail or document.title or f"status {status}",
                param=document.param,
                request_id=document.request_id,
                retry_after=retry_after,
            )
        if status in _GATEWAY_STATUSES:
            error = self.broken_off(f"a proxy answers {status}")
            error.retry_after = retry_after
            return error
        location = response.headers.get("location")
        return self.unexpected(f"status {status}" + (f", redirects to {location}" if location else ""))

    def seconds_to_wait(self, error: ClientError, patience: Patience, request: Request | None = None) -> float:
        """How long to wait before a request is sent again; tells `on_wait`.

        Args:
            error: what came of it.
            patience: how long there has been no answer.
            request: what was sent; None if it may be sent again whatever the server has made of it.

        Raises:
            ClientError: the given one, if waiting does not help, may do harm, or has been long enough.
        """
        may_have_arrived = isinstance(error, ServerUnreachableError) and error.may_have_arrived
        if request is not None and not request.is_repeatable and may_have_arrived:
            raise error
        seconds = patience.next_wait(error.retry_after) if error.is_passing else None
        if seconds is None:
            raise error
        is_silent = isinstance(error, ServerUnreachableError)
        reason = error.reason if isinstance(error, ServerUnreachableError) else str(error)
        left = patience.seconds_left
        self._on_wait(Waiting(reason=reason, seconds=seconds, seconds_left=left, has_answered=not is_silent))
        return seconds

    def store(self, answer: httpx2.Response, asked: Request) -> "Store":
        """Where a redirection leads.

        Raises:
            UnexpectedAnswerError: nowhere.
        """
        try:
            url = httpx2.URL(answer.headers.get("location", ""))
        except httpx2.InvalidURL as error:
            raise self.unexpected("a redirection to no address") from error
        if url.scheme not in {"http", "https"} or not url.host or url.userinfo:
            raise self.unexpected("a redirection to no address")
        return Store(url, asked)


class Store:
    """The store that a server sends its clients to, for one file.

    A client of its own asks it: what proves to the server who asks is none of the store's business.

    Attributes:
        options: what the HTTP library's client takes.
        arguments: what its `stream` takes.
    """

    def __init__(self, url: httpx2.URL, asked: Request) -> None:
        # Not with a signature, which is as good as the file.
        self._address = f"{url.scheme}://{url.netloc.decode('ascii')}"
        self.options: dict[str, Any] = {
            "timeout": timeout(asked.read_seconds),
            "trust_env": not _is_loopback(url.host),
        }
        # The condition is on the server's own ETag, which the store does not know.
        headers = {name: value for name, value in asked.headers.items() if name != "If-Range"}
        self.arguments: dict[str, Any] = {"method": "GET", "url": url, "headers": headers}

    def require_success(self, response: httpx2.Response) -> None:
        """Refuse an answer without the file.

        Raises:
            StoreUnreachableError: it is one.
        """
        if not response.is_success:
            # The address was fresh: what is refused now will be refused again.
            is_passing = response.is_server_error or response.status_code in _ASK_LATER
            raise StoreUnreachableError(self._address, f"status {response.status_code}", is_passing=is_passing)

    def unreachable(self, error: httpx2.RequestError) -> StoreUnreachableError:
        """What the HTTP library's error means."""
        return StoreUnreachableError(self._address, _reason(error))


def file_request(path: str, *, start: int, etag: str, read_seconds: float) -> Request:
    """Ask for the bytes of a file, from the server or from the store that it sends clients to.

    Args:
        path: below the server's address.
        start: the first byte wanted.
        etag: of the content that the bytes before are of; the whole file comes if the server has another.
        read_seconds: longest silence within the answer.
    """
    # Compressed on the way, sizes and ranges would be those of another content.
    headers = {"Accept-Encoding": "identity"}
    if start > 0:
        headers |= {"Range": f"bytes={start}-", "If-Range": etag}
    return Request(method="GET", path=path, headers=headers, read_seconds=read_seconds, may_redirect=True)


def is_redirect(response: httpx2.Response) -> bool:
    """Whether the answer is that the client is to look elsewhere."""
    return response.status_code == _TEMPORARY_REDIRECT


def timeout(read_seconds: float | None) -> httpx2.Timeout:
    """Longest silences, with another one within the answer than the usual if given."""
    return httpx2.Timeout(read_seconds or _SILENCE_SECONDS, connect=_CONNECT_SECONDS)


def _server_url(server: str) -> httpx2.URL:
    try:
        url = httpx2.URL(server)
    except httpx2.InvalidURL as error:
        raise InvalidArgumentError(f"{server!r} is no server's address ({error}); write http://HOST:PORT") from error
    if url.scheme not in {"http", "https"} or not url.host:
        raise InvalidArgumentError(f"{server!r} is no server's address; write http://HOST:PORT")
    return url


def _usable_key(key: str) -> str:
    # What cannot stand in a header; the message does not repeat it.
    if not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidArgumentError("the API key holds characters that no key has; copy it again, it begins with rk_")
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reason(error: httpx2.RequestError) -> str:
    if isinstance(error, httpx2.TimeoutException):
        return "timed out"
    if isinstance(error, httpx2.RemoteProtocolError | httpx2.ReadError):
        return "the connection broke off"
    number = _system_error(error)
    if number is not None:
        return os.strerror(number)
    text = str(error).partition("] ")[2] or str(error)
    return text or type(error).__name__


def _system_error(error: BaseException) -> int | None:
    """The system's number of what went wrong, which the asynchronous HTTP library hides behind errors of its own."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return error.errno
    behind = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
    return None if behind is None else _system_error(behind)
