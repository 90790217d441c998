"""Network, clock and disk of the clients: asynchronous, or blocking in coroutines that never suspend."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, BinaryIO, ParamSpec, TypeAlias, TypeVar

import httpx2

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_PIECE_BYTES = 2**20


class AsyncConnections:
    """Connections that suspend a coroutine while they wait.

    Args:
        options: arguments for the HTTP library's client.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.http = httpx2.AsyncClient(**options)

    async def aclose(self) -> None:
        """Close all connections."""
        await self.http.aclose()

    def stream(self, arguments: Mapping[str, Any]) -> AbstractAsyncContextManager[httpx2.Response]:
        """Send a request and yield its answer; arguments are those of the HTTP library's `stream`."""
        return self.http.stream(**arguments)

    async def read(self, response: httpx2.Response) -> None:
        """Read the whole body of an answer."""
        await response.aread()

    def pieces(self, response: httpx2.Response) -> AsyncIterator[bytes]:
        """Yield the body of an answer as it arrives."""
        return response.aiter_raw()

    def messages(self, source: httpx2.EventSource) -> AsyncIterator[httpx2.ServerSentEvent]:
        """Yield the messages of a stream of events as they arrive."""
        return aiter(source)

    async def body(self, file: BinaryIO) -> AsyncIterator[bytes]:
        """Yield the content of a file to send."""
        while piece := await self.in_thread(file.read, _PIECE_BYTES):
            yield piece

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)

    async def in_thread(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Result:
        """Run a function that accesses the disk in a thread, and return its result.

        Once started it is completed even if the caller is cancelled, so that no file is closed while it is being
        written.
        """
        work = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **options))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            # Retrieve its exception, or it would be logged as unhandled; the cancellation takes precedence.
            if not work.cancelled():
                work.exception()
            raise


class BlockingConnections:
    """Connections that block the thread while they wait, with the methods of `AsyncConnections`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.http = httpx2.Client(**options)

    async def aclose(self) -> None:
        """See `AsyncConnections.aclose`."""
        self.http.close()

    @asynccontextmanager
    async def stream(self, arguments: Mapping[str, Any]) -> AsyncIterator[httpx2.Response]:
        """See `AsyncConnections.stream`."""
        with self.http.stream(**arguments) as response:
            yield response

    async def read(self, response: httpx2.Response) -> None:
        """See `AsyncConnections.read`."""
        response.read()

    async def pieces(self, response: httpx2.Response) -> AsyncIterator[bytes]:
        """See `AsyncConnections.pieces`."""
        for piece in response.iter_raw():
            yield piece

    async def messages(self, source: httpx2.EventSource) -> AsyncIterator[httpx2.ServerSentEvent]:
        """See `AsyncConnections.messages`."""
        for message in source:
            yield message

    def body(self, file: BinaryIO) -> BinaryIO:
        """Return a file to send."""
        return file

    async def sleep(self, seconds: float) -> None:
        """See `AsyncConnections.sleep`."""
        time.sleep(seconds)

    async def in_thread(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Result:
        """Run the function in this thread."""
        return function(*arguments, **options)


Connections: TypeAlias = AsyncConnections | BlockingConnections
