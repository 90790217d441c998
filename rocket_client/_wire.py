"""Requests, interpretation of answers, and handling of errors. No network I/O."""

import ipaddress
import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import httpx2
from pydantic import BaseModel, ValidationError

from rocket_client._retry import RetryBudget, retry_after_seconds
from rocket_client.errors import (
    ClientError,
    InvalidArgumentError,
    ProblemError,
    ServerUnreachableError,
    StoreUnreachableError,
    UnexpectedAnswerError,
)

Answer = TypeVar("Answer", bound=BaseModel)
Params: TypeAlias = Mapping[str, str | int | None]

_PROBLEM_TYPE = "application/problem+json"
_SILENCE_SECONDS = 30.0
_CONNECT_SECONDS = 5.0
_TEMPORARY_REDIRECT = 307
_ASK_LATER = frozenset({408, 429})
# Statuses with which proxies answer for a server that does not.
_GATEWAY_STATUSES = frozenset({502, 503, 504})
# After these the request has not left this machine.
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request.

    Attributes:
        method: HTTP method.
        path: path below the server's address.
        params: query parameters; those that are None are not sent.
        json: JSON body.
        content: body that is sent unchanged.
        file: file that is sent unchanged as the body.
        headers: additional headers.
        is_idempotent: whether the request is idempotent.
        read_seconds: read timeout within the answer; None takes the default.
        may_redirect: whether the answer may be a redirect.
    """

    method: str
    path: str
    params: Params = field(default_factory=dict)
    json: Any = None
    content: bytes | None = field(default=None, repr=False)
    file: Path | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_idempotent: bool = True
    read_seconds: float | None = None
    may_redirect: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for the HTTP library's `stream`, except a file."""
        return {
            "method": self.method,
            "url": self.path,
            "params": {name: value for name, value in self.params.items() if value is not None},
            "headers": dict(self.headers),
            "timeout": timeout(self.read_seconds),
            "json": self.json,
            "content": self.content,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Request, Generic[Answer]):
    """A request with the kind of resource that answers it."""

    answer: type[Answer]


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferProgress:
    """Progress of a download, or of a model's upload.

    Attributes:
        name: the current file.
        done: bytes of all files that have arrived, in this call and before.
        total: bytes of all files.
        received: bytes that have arrived in this call.
    """

    name: str
    done: int
    total: int
    received: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryNotice:
    """Notice of a retry after a wait.

    Attributes:
        reason: message from the server or the network.
        seconds: seconds until the retry.
        seconds_left: seconds until the client gives up.
        has_answered: whether the server answered that it is busy, instead of not answering.
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
    """Authentication that sends an API key only to the server itself, as a redirect may lead to another host."""

    def __init__(self, key: str, server: httpx2.URL) -> None:
        self._header = f"Bearer {key}"
        self._origin = server.origin

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        """Add the header on the first and only round."""
        if request.url.origin == self._origin:
            request.headers["Authorization"] = self._header
        yield request


class Wire:
    """Settings of a connection, and the interpretation of the server's answers.

    Args:
        server: the server's address, `http://HOST:PORT`.
        api_key: API key; None where the server does not require one.
        patience: seconds without an answer after which a request fails.
        on_retry: called before each wait.

    Attributes:
        options: arguments for the HTTP library's client.

    Raises:
        InvalidArgumentError: the address or the key is not valid.
    """

    def __init__(
        self, server: str, *, patience: float, on_retry: Callable[[RetryNotice], None], api_key: str | None = None
    ) -> None:
        url = _server_url(server)
        self.server = server.rstrip("/")
        self.patience = patience
        self._on_retry = on_retry
        self.options: dict[str, Any] = {
            "base_url": url,
            "timeout": timeout(None),
            # A proxy named by the environment cannot reach this machine's loopback.
            "trust_env": not is_loopback(url.host),
            "auth": None if api_key is None else KeyAuth(_usable_key(api_key), url),
        }

    def parse(self, text: str | bytes, kind: type[Answer]) -> Answer:
        """Return the resource in a JSON text; unknown members are ignored.

        Raises:
            UnexpectedAnswerError: the text is not such a resource.
        """
        try:
            return kind.model_validate_json(text, extra="ignore")
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise self.unexpected(f"{kind.__name__}: {where or 'body'}: {first['msg']}") from error

    def unexpected(self, description: str) -> UnexpectedAnswerError:
        """Return the error for an answer that this client does not understand."""
        return UnexpectedAnswerError(self.server, description)

    def broken_off(self, reason: str) -> ServerUnreachableError:
        """Return the error for an incomplete answer."""
        return ServerUnreachableError(self.server, reason, may_have_arrived=True)

    def unreachable(self, error: httpx2.RequestError) -> ServerUnreachableError:
        """Return the error for an error of the HTTP library."""
        arrived = not isinstance(error, _NOT_SENT)
        return ServerUnreachableError(self.server, _reason(error), may_have_arrived=arrived)

    def is_usable(self, request: Request, response: httpx2.Response) -> bool:
        """Return whether an answer is a success; if not, read it and pass it to `refusal`."""
        return response.is_success or (request.may_redirect and is_redirect(response))

    def refusal(self, response: httpx2.Response) -> ClientError:
        """Return the error for an answer that is not a success; its body must have been read."""
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

    def seconds_to_wait(self, error: ClientError, retry_budget: RetryBudget, request: Request | None = None) -> float:
        """Return the seconds to wait before a retry, and call `on_retry`.

        Args:
            error: error of the last try.
            retry_budget: backoff and deadline.
            request: the request; None if it can always be retried.

        Raises:
            ClientError: the given error, if it is permanent, if a retry is not safe, or if the deadline has passed.
        """
        may_have_arrived = isinstance(error, ServerUnreachableError) and error.may_have_arrived
        if request is not None and not request.is_idempotent and may_have_arrived:
            raise error
        seconds = retry_budget.next_delay(error.retry_after) if error.retryable else None
        if seconds is None:
            raise error
        is_silent = isinstance(error, ServerUnreachableError)
        reason = error.reason if isinstance(error, ServerUnreachableError) else str(error)
        left = retry_budget.seconds_left
        self._on_retry(RetryNotice(reason=reason, seconds=seconds, seconds_left=left, has_answered=not is_silent))
        return seconds

    def store(self, answer: httpx2.Response, request: Request) -> "Store":
        """Return the store that a redirect leads to.

        Raises:
            UnexpectedAnswerError: the location is not a valid address.
        """
        try:
            url = httpx2.URL(answer.headers.get("location", ""))
        except httpx2.InvalidURL as error:
            raise self.unexpected("a redirect without a valid address") from error
        if url.scheme not in {"http", "https"} or not url.host or url.userinfo:
            raise self.unexpected("a redirect without a valid address")
        return Store(url, request)


class Store:
    """The store that a server redirects its clients to, for one file.

    It needs a separate HTTP client: the server's API key must not be sent to the store.

    Attributes:
        options: arguments for the HTTP library's client.
        arguments: arguments for its `stream`.
    """

    def __init__(self, url: httpx2.URL, request: Request) -> None:
        # Without the query, whose signature gives access to the file.
        self._address = f"{url.scheme}://{url.netloc.decode('ascii')}"
        self.options: dict[str, Any] = {
            "timeout": timeout(request.read_seconds),
            "trust_env": not is_loopback(url.host),
        }
        # The condition is on the server's own ETag, which the store does not know.
        headers = {name: value for name, value in request.headers.items() if name != "If-Range"}
        self.arguments: dict[str, Any] = {"method": "GET", "url": url, "headers": headers}

    def check_success(self, response: httpx2.Response) -> None:
        """Raise an error for an answer without the file.

        Raises:
            StoreUnreachableError: the status is not a success.
        """
        if not response.is_success:
            # The address was fresh, so a refusal is permanent.
            retryable = response.is_server_error or response.status_code in _ASK_LATER
            raise StoreUnreachableError(self._address, f"status {response.status_code}", retryable=retryable)

    def unreachable(self, error: httpx2.RequestError) -> StoreUnreachableError:
        """Return the error for an error of the HTTP library."""
        return StoreUnreachableError(self._address, _reason(error))


def file_request(path: str, *, start: int, etag: str, read_seconds: float) -> Request:
    """Return the request for a file's bytes, from the server or from the store that it redirects to.

    Args:
        path: path below the server's address.
        start: offset of the first byte.
        etag: ETag of the content that the bytes before `start` are from; if the server has different content, it sends
            the whole file.
        read_seconds: read timeout within the answer.
    """
    # With a content encoding, sizes and ranges would be those of the compressed content.
    headers = {"Accept-Encoding": "identity"}
    if start > 0:
        headers |= {"Range": f"bytes={start}-", "If-Range": etag}
    return Request(method="GET", path=path, headers=headers, read_seconds=read_seconds, may_redirect=True)


def is_redirect(response: httpx2.Response) -> bool:
    """Return whether an answer is a redirect."""
    return response.status_code == _TEMPORARY_REDIRECT


def timeout(read_seconds: float | None) -> httpx2.Timeout:
    """Return the timeouts, with the given read timeout or the default."""
    return httpx2.Timeout(read_seconds or _SILENCE_SECONDS, connect=_CONNECT_SECONDS)


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _server_url(server: str) -> httpx2.URL:
    try:
        url = httpx2.URL(server)
    except httpx2.InvalidURL as error:
        raise InvalidArgumentError(f"{server!r} is not a server address ({error}); write http://HOST:PORT") from error
    if url.scheme not in {"http", "https"} or not url.host:
        raise InvalidArgumentError(f"{server!r} is not a server address; write http://HOST:PORT")
    return url


def _usable_key(key: str) -> str:
    # The characters must be valid in a header. The message does not repeat the key.
    if not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidArgumentError("the API key contains invalid characters; copy it again, it begins with rk_")
    return key


def _reason(error: httpx2.RequestError) -> str:
    if isinstance(error, httpx2.TimeoutException):
        return "timed out"
    if isinstance(error, httpx2.RemoteProtocolError | httpx2.ReadError):
        return "the connection was closed"
    number = _system_error(error)
    if number is not None:
        return os.strerror(number)
    text = str(error).partition("] ")[2] or str(error)
    return text or type(error).__name__


def _system_error(error: BaseException) -> int | None:
    """Return the system's error number, which the asynchronous HTTP library wraps in its own errors."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return error.errno
    cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
    return None if cause is None else _system_error(cause)
