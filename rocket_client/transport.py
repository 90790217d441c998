"""Requests to one server: sent again while it does not answer, and its refusals turned into errors."""

import ipaddress
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from pydantic import BaseModel, ValidationError

from rocket_client.backoff import Patience, retry_after_seconds
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
_TIMEOUT = httpx2.Timeout(30.0, connect=5.0)
_TEMPORARY_REDIRECT = 307
_ASK_LATER = frozenset({408, 429})
# What proxies answer for a server that does not.
_GATEWAY_STATUSES = frozenset({502, 503, 504})
# After these the request has not left this machine.
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Why the client waits.

    Attributes:
        reason: what the server or the network says.
        seconds: until it asks again.
        seconds_left: until it gives up.
    """

    reason: str
    seconds: float
    seconds_left: float


class _ProblemDocument(BaseModel):
    status: int | None = None
    code: str = "unknown"
    detail: str = ""
    title: str = ""
    param: str | None = None
    request_id: str | None = None


class _KeyAuth(httpx2.Auth):
    """Adds an API key to what goes to the server, and to nothing else: a redirect may lead to somebody else's."""

    def __init__(self, key: str, server: httpx2.URL) -> None:
        self._header = f"Bearer {key}"
        self._origin = server.origin

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        if request.url.origin == self._origin:
            request.headers["Authorization"] = self._header
        yield request


class Transport:
    """The way to one server.

    Args:
        server: its address, `http://HOST:PORT`.
        api_key: what proves who asks; None where no server wants it.
        patience: seconds without an answer after which a request fails.
        on_wait: told before each wait.

    Raises:
        InvalidArgumentError: the address is none, or the key cannot be one.
    """

    def __init__(
        self, server: str, *, patience: float, on_wait: Callable[[Waiting], None], api_key: str | None = None
    ) -> None:
        url = _server_url(server)
        self.server = server.rstrip("/")
        self._patience = patience
        self._on_wait = on_wait
        # A proxy of the environment cannot reach this machine's own loopback.
        self._http = httpx2.Client(
            base_url=url,
            timeout=_TIMEOUT,
            trust_env=not _is_loopback(url.host),
            auth=None if api_key is None else _KeyAuth(_usable_key(api_key), url),
        )

    def close(self) -> None:
        """Closes all connections."""
        self._http.close()

    def get(self, path: str, kind: type[Answer], **params: str | int | None) -> Answer:
        """The resource at a path.

        Args:
            path: below the server's address.
            kind: what to expect there.
            params: the query, without those that are None.
        """
        return self.parse(self.send("GET", path, params=params).content, kind)

    def send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str | int | None] | None = None,
        json: Any = None,
        file: Path | None = None,
        headers: Mapping[str, str] | None = None,
        is_repeatable: bool = True,
        patience: float | None = None,
    ) -> httpx2.Response:
        """Sends a request, again and again while the server does not answer or asks for time.

        Args:
            method: HTTP method.
            path: below the server's address.
            params: the query, without those that are None.
            json: the body.
            file: the body as it is, read while it is sent.
            headers: further headers.
            is_repeatable: whether it does no harm that the server receives it twice.
            patience: seconds without an answer before giving up; None takes this transport's.

        Returns:
            The answer, read, with a status below 300.

        Raises:
            ClientError: there is no such answer.
            OSError: the file cannot be read.
        """
        left = Patience(self._patience if patience is None else patience)
        while True:
            try:
                with self.open(method, path, params=params, json=json, file=file, headers=headers) as response:
                    response.read()
                    return response
            except ClientError as error:
                if not is_repeatable and isinstance(error, ServerUnreachableError) and error.may_have_arrived:
                    raise
                self.wait_out(error, left)

    @contextmanager
    def open(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str | int | None] | None = None,
        json: Any = None,
        file: Path | None = None,
        headers: Mapping[str, str] | None = None,
        read_seconds: float | None = None,
        may_redirect: bool = False,
    ) -> Iterator[httpx2.Response]:
        """Sends a request once and gives its answer to be read; what happens while it is read is told alike.

        Args:
            method: HTTP method.
            path: below the server's address.
            params: the query, without those that are None.
            json: the body.
            file: the body as it is, read while it is sent.
            headers: further headers.
            read_seconds: longest silence within the answer.
            may_redirect: whether the answer may be that the client is to look elsewhere.

        Raises:
            ServerUnreachableError: there is no answer, or it breaks off.
            ProblemError: the server refuses.
            UnexpectedAnswerError: the answer is none of this service.
            OSError: the file cannot be read.
        """
        timeout = _TIMEOUT if read_seconds is None else httpx2.Timeout(read_seconds, connect=5.0)
        query = {name: value for name, value in (params or {}).items() if value is not None}
        try:
            with (
                _body(json, file) as body,
                self._http.stream(method, path, params=query, headers=headers, timeout=timeout, **body) as response,
            ):
                if not response.is_success and not (may_redirect and response.status_code == _TEMPORARY_REDIRECT):
                    response.read()
                    raise self._refusal(response)
                yield response
        except httpx2.RequestError as error:
            arrived = not isinstance(error, _NOT_SENT)
            raise ServerUnreachableError(self.server, _reason(error), may_have_arrived=arrived) from error

    @contextmanager
    def open_file(self, path: str, *, start: int, etag: str, read_seconds: float) -> Iterator[httpx2.Response]:
        """The bytes of a file, from this server or from the store that it sends clients to.

        Args:
            path: below the server's address.
            start: the first byte wanted.
            etag: of the content that the bytes before are of; the whole file comes if the server has another.
            read_seconds: longest silence within the answer.

        Raises:
            ClientError: as `open`.
            StoreUnreachableError: the store does not give them.
        """
        # Compressed on the way, sizes and ranges would be those of another content.
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start > 0 else {})
        condition = {"If-Range": etag} if start > 0 else {}
        with self.open(
            "GET", path, headers=headers | condition, read_seconds=read_seconds, may_redirect=True
        ) as answer:
            if answer.status_code != _TEMPORARY_REDIRECT:
                yield answer
                return
            url = self._store_url(answer)
        with self._open_at_store(url, headers, read_seconds) as answer:
            yield answer

    @contextmanager
    def _open_at_store(
        self, url: httpx2.URL, headers: Mapping[str, str], read_seconds: float
    ) -> Iterator[httpx2.Response]:
        store = f"{url.scheme}://{url.netloc.decode('ascii')}"
        timeout = httpx2.Timeout(read_seconds, connect=5.0)
        # A client of its own: what proves to the server who asks is none of the store's business.
        try:
            with (
                httpx2.Client(timeout=timeout, trust_env=not _is_loopback(url.host)) as http,
                http.stream("GET", url, headers=headers) as response,
            ):
                if not response.is_success:
                    # The address was fresh: what is refused now will be refused again.
                    is_passing = response.is_server_error or response.status_code in _ASK_LATER
                    raise StoreUnreachableError(store, f"status {response.status_code}", is_passing=is_passing)
                yield response
        except httpx2.RequestError as error:
            raise StoreUnreachableError(store, _reason(error)) from error

    def _store_url(self, answer: httpx2.Response) -> httpx2.URL:
        try:
            url = httpx2.URL(answer.headers.get("location", ""))
        except httpx2.InvalidURL as error:
            raise self.unexpected("a redirection to no address") from error
        if url.scheme not in {"http", "https"} or not url.host or url.userinfo:
            raise self.unexpected("a redirection to no address")
        return url

    def wait_out(self, error: ClientError, patience: Patience) -> None:
        """Waits before a request is sent again.

        Raises:
            ClientError: the given one, if waiting does not help or has been long enough.
        """
        seconds = patience.next_wait(error.retry_after) if error.is_passing else None
        if seconds is None:
            raise error
        reason = error.reason if isinstance(error, ServerUnreachableError) else str(error)
        self._on_wait(Waiting(reason=reason, seconds=seconds, seconds_left=patience.seconds_left))
        time.sleep(seconds)

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

    def _refusal(self, response: httpx2.Response) -> ClientError:
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
            error = ServerUnreachableError(self.server, f"a proxy answers {status}", may_have_arrived=True)
            error.retry_after = retry_after
            return error
        location = response.headers.get("location")
        return self.unexpected(f"status {status}" + (f", redirects to {location}" if location else ""))


@contextmanager
def _body(json: Any, file: Path | None) -> Iterator[dict[str, Any]]:
    if file is None:
        yield {"json": json}
        return
    with file.open("rb") as stream:
        yield {"content": stream}


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
    text = str(error).partition("] ")[2] or str(error)
    return text or type(error).__name__
