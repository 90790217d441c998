"""Blocking and asynchronous connections to a server, with retries, and refusals turned into errors.

The two differ only in how they wait; requests and the interpretation of answers are in `_wire`.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

import httpx2

from rocket_client._retry import RetryBudget
from rocket_client._wire import Answer, Call, Request, RetryNotice, Wire, is_redirect
from rocket_client.errors import ClientError

Result = TypeVar("Result")

_PIECE_BYTES = 2**20


class Transport(Wire):
    """Blocking connection to a server; see `Wire`."""

    def __init__(
        self, server: str, *, patience: float, on_retry: Callable[[RetryNotice], None], api_key: str | None = None
    ) -> None:
        super().__init__(server, patience=patience, on_retry=on_retry, api_key=api_key)
        self._http = httpx2.Client(**self.options)

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def call(self, call: Call[Answer], *, patience: float | None = None) -> Answer:
        """Send a request and return the resource in the answer; raises the same errors as `send`."""
        return self.parse(self.send(call, patience=patience).content, call.answer)

    def send(self, request: Request, *, patience: float | None = None) -> httpx2.Response:
        """Send a request, and retry while the server does not answer or is busy.

        Args:
            request: the request.
            patience: seconds without an answer before giving up; None takes this transport's.

        Returns:
            The answer, with its body read and a status below 300.

        Raises:
            ClientError: there was no such answer.
            OSError: the file to send cannot be read.
        """
        retry_budget = RetryBudget(self.patience if patience is None else patience)
        while True:
            try:
                with self.open(request) as response:
                    response.read()
                    return response
            except ClientError as error:
                self.wait_out(error, retry_budget, request)

    @contextmanager
    def open(self, request: Request) -> Iterator[httpx2.Response]:
        """Send a request once and yield its answer for reading; errors while reading are converted as well.

        Raises:
            ServerUnreachableError: the answer is missing or incomplete.
            ProblemError: the server refuses.
            UnexpectedAnswerError: the answer is not from this service.
            OSError: the file to send cannot be read.
        """
        try:
            with _body(request) as body, self._http.stream(**request.arguments() | body) as response:
                if not self.is_usable(request, response):
                    response.read()
                    raise self.refusal(response)
                yield response
        except httpx2.RequestError as error:
            raise self.unreachable(error) from error

    @contextmanager
    def open_file(self, request: Request) -> Iterator[httpx2.Response]:
        """Open a `file_request` like `open`; raises StoreUnreachableError too, if a store does not serve the file."""
        with self.open(request) as answer:
            if not is_redirect(answer):
                yield answer
                return
            store = self.store(answer, request)
        try:
            with httpx2.Client(**store.options) as http, http.stream(**store.arguments) as response:
                store.check_success(response)
                yield response
        except httpx2.RequestError as error:
            raise store.unreachable(error) from error

    def wait_out(self, error: ClientError, retry_budget: RetryBudget, request: Request | None = None) -> None:
        """Wait before a retry; arguments and errors are those of `seconds_to_wait`."""
        time.sleep(self.seconds_to_wait(error, retry_budget, request))


class AsyncTransport(Wire):
    """Asynchronous connection to a server, with the methods of `Transport`."""

    def __init__(
        self, server: str, *, patience: float, on_retry: Callable[[RetryNotice], None], api_key: str | None = None
    ) -> None:
        super().__init__(server, patience=patience, on_retry=on_retry, api_key=api_key)
        self._http = httpx2.AsyncClient(**self.options)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def call(self, call: Call[Answer], *, patience: float | None = None) -> Answer:
        """See `Transport.call`."""
        return self.parse((await self.send(call, patience=patience)).content, call.answer)

    async def send(self, request: Request, *, patience: float | None = None) -> httpx2.Response:
        """See `Transport.send`."""
        retry_budget = RetryBudget(self.patience if patience is None else patience)
        while True:
            try:
                async with self.open(request) as response:
                    await response.aread()
                    return response
            except ClientError as error:
                await self.wait_out(error, retry_budget, request)

    @asynccontextmanager
    async def open(self, request: Request) -> AsyncIterator[httpx2.Response]:
        """See `Transport.open`."""
        try:
            async with _async_body(request) as body, self._http.stream(**request.arguments() | body) as response:
                if not self.is_usable(request, response):
                    await response.aread()
                    raise self.refusal(response)
                yield response
        except httpx2.RequestError as error:
            raise self.unreachable(error) from error

    @asynccontextmanager
    async def open_file(self, request: Request) -> AsyncIterator[httpx2.Response]:
        """See `Transport.open_file`."""
        async with self.open(request) as answer:
            if not is_redirect(answer):
                yield answer
                return
            store = self.store(answer, request)
        try:
            async with httpx2.AsyncClient(**store.options) as http, http.stream(**store.arguments) as response:
                store.check_success(response)
                yield response
        except httpx2.RequestError as error:
            raise store.unreachable(error) from error

    async def wait_out(self, error: ClientError, retry_budget: RetryBudget, request: Request | None = None) -> None:
        """See `Transport.wait_out`."""
        await asyncio.sleep(self.seconds_to_wait(error, retry_budget, request))


async def in_thread(function: Callable[[], Result]) -> Result:
    """Run a function that accesses the disk in a thread, and return its result.

    Once started it is completed even if the caller is cancelled, so that no file is closed while it is being written.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        # Retrieve its exception, or it would be logged as unhandled; the cancellation takes precedence.
        if not work.cancelled():
            work.exception()
        raise


@contextmanager
def _body(request: Request) -> Iterator[dict[str, Any]]:
    if request.file is None:
        yield {}
        return
    with request.file.open("rb") as stream:
        yield {"content": stream, "json": None}


@asynccontextmanager
async def _async_body(request: Request) -> AsyncIterator[dict[str, Any]]:
    if request.file is None:
        yield {}
        return
    with request.file.open("rb") as stream:

        async def pieces() -> AsyncIterator[bytes]:
            while piece := await in_thread(partial(stream.read, _PIECE_BYTES)):
                yield piece

        # As in the blocking library, the length is sent first: a server may refuse a file that is too long by it.
        length = str(os.fstat(stream.fileno()).st_size)
        yield {"content": pieces(), "json": None, "headers": {**request.headers, "Content-Length": length}}
