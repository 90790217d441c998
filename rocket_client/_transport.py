"""Requests to a server, with retries, and refusals turned into errors.

The interpretation of answers is in `_wire`, waiting in `_connections`.
"""

import os
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager

import httpx2

from rocket_client._connections import Connections
from rocket_client._requests import header_text, token_header
from rocket_client._retry import RetryBudget
from rocket_client._wire import Answer, Call, Params, Request, Wire, is_redirect
from rocket_client.errors import ClientError
from rocket_client.models import Job


class Transport:
    """A connection to a server.

    Args:
        wire: its settings, and the interpretation of answers.
        connections: where requests are sent.
    """

    def __init__(self, wire: Wire, connections: Connections) -> None:
        self.wire = wire
        self.connections = connections

    async def get(self, answer: type[Answer], path: str, params: Params | None = None) -> Answer:
        """Return a resource; raises the same errors as `send`."""
        return await self.call(Call(method="GET", path=path, params=params or {}, answer=answer))

    async def post(
        self,
        answer: type[Answer],
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        is_idempotent: bool = True,
    ) -> Answer:
        """Return the resource that answers a request; raises the same errors as `send`."""
        headers = headers or {}
        return await self.call(
            Call(method="POST", path=path, json=body, headers=headers, is_idempotent=is_idempotent, answer=answer)
        )

    async def create_job(
        self, path: str, body: Mapping[str, object], idempotency_key: str | None, hub_token: str | None = None
    ) -> Job:
        """Return the new job that a request creates; raises the same errors as `send`."""
        # There is always a key: a request whose answer is lost is retried, and must not create a second job.
        headers = {"Idempotency-Key": header_text(idempotency_key or str(uuid.uuid4())), **token_header(hub_token)}
        return await self.post(Job, path, body, headers=headers)

    async def delete(self, path: str) -> None:
        """Delete a resource; raises the same errors as `send`."""
        # A second deletion would be answered with "not found".
        await self.send(Request(method="DELETE", path=path, is_idempotent=False))

    async def call(self, call: Call[Answer], *, patience: float | None = None) -> Answer:
        """Send a request and return the resource in the answer; raises the same errors as `send`."""
        return self.wire.parse((await self.send(call, patience=patience)).content, call.answer)

    async def send(self, request: Request, *, patience: float | None = None) -> httpx2.Response:
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
        retry_budget = RetryBudget(self.wire.patience if patience is None else patience)
        while True:
            try:
                async with self.open(request) as response:
                    await self.connections.read(response)
                    return response
            except ClientError as error:
                await self.wait_out(error, retry_budget, request)

    @asynccontextmanager
    async def open(self, request: Request) -> AsyncIterator[httpx2.Response]:
        """Send a request once and yield its answer for reading; errors while reading are converted as well.

        Raises:
            ServerUnreachableError: the answer is missing or incomplete.
            ProblemError: the server refuses.
            UnexpectedAnswerError: the answer is not from this service.
            OSError: the file to send cannot be read.
        """
        try:
            with ExitStack() as stack:
                arguments = request.arguments()
                if request.file is not None:
                    file = stack.enter_context(request.file.open("rb"))
                    # The length is sent first: a server may refuse a file that is too long by it.
                    arguments["headers"]["Content-Length"] = str(os.fstat(file.fileno()).st_size)
                    arguments["content"] = self.connections.body(file)
                async with self.connections.stream(arguments) as response:
                    if not self.wire.is_usable(request, response):
                        await self.connections.read(response)
                        raise self.wire.refusal(response)
                    yield response
        except httpx2.RequestError as error:
            raise self.wire.unreachable(error) from error

    @asynccontextmanager
    async def open_file(self, request: Request) -> AsyncIterator[httpx2.Response]:
        """Open a `file_request` like `open`; raises StoreUnreachableError too, if a store does not serve the file."""
        async with self.open(request) as answer:
            if not is_redirect(answer):
                yield answer
                return
            store = self.wire.store(answer, request)
        try:
            async with (
                aclosing(type(self.connections)(store.options)) as connections,
                connections.stream(store.arguments) as response,
            ):
                store.check_success(response)
                yield response
        except httpx2.RequestError as error:
            raise store.unreachable(error) from error

    async def wait_out(self, error: ClientError, retry_budget: RetryBudget, request: Request | None = None) -> None:
        """Wait before a retry; arguments and errors are those of `seconds_to_wait`."""
        await self.connections.sleep(self.wire.seconds_to_wait(error, retry_budget, request))
