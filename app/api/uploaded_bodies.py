"""Reception of uploads: on the event loop into a bounded buffer, so that a slow client holds no thread."""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from tempfile import SpooledTemporaryFile

import anyio
from fastapi import Request
from starlette.exceptions import HTTPException

from app.api.tenant_shares import SharedThreads, TenantSlots, Threads
from app.services.access import Caller
from app.shared.errors import TooManyUploadsError
from app.shared.settings import Settings
from app.shared.storage.store import storage_errors

THREADS = 8
"""Threads that write received data, and store complete uploads."""
_RECEIVED_AT_ONCE = 64
_THREADS_OF_A_TENANT = 2
_SILENCE_SECONDS = 30.0
_BUFFER_BYTES = 2**18


class UploadReceiver:
    """The uploads that this process is receiving; used from the event loop only.

    Args:
        settings: how many uploads of one tenant are received at once, and how long each may take.
    """

    def __init__(self, settings: Settings) -> None:
        self._slots = TenantSlots(_RECEIVED_AT_ONCE, share=settings.max_concurrent_uploads)
        self._threads = SharedThreads(THREADS, share=_THREADS_OF_A_TENANT)
        self._folder = settings.data_dir
        self._seconds = settings.upload_seconds

    @asynccontextmanager
    async def receive(self, request: Request, caller: Caller) -> AsyncIterator[tuple[Iterator[bytes], Threads]]:
        """Receive a body; yield its content in pieces, and the threads to store it with.

        The slot is occupied until the end of the block; a large body is in an unnamed file, which is removed with it.

        Raises:
            TooManyUploadsError: as many are being received as allowed, of this tenant or in total.
            HTTPException: 408, the body does not arrive in time.
            StorageError: the body cannot be written.
        """
        if not self._slots.try_acquire(caller):
            raise TooManyUploadsError("the limit on concurrent uploads is reached; try again later")
        threads = self._threads.of(caller)
        try:
            with SpooledTemporaryFile(max_size=_BUFFER_BYTES, dir=str(self._folder)) as file:
                await self._spool(request, file, threads)
                yield _pieces(file, self._folder), threads
        finally:
            self._slots.release(caller)

    async def _spool(self, request: Request, file: "SpooledTemporaryFile[bytes]", threads: Threads) -> None:
        stream = request.stream()
        deadline = time.monotonic() + self._seconds
        buffer = bytearray()
        while (chunk := await _next_chunk(stream, deadline)) is not None:
            buffer += chunk
            if len(buffer) >= _BUFFER_BYTES:
                await threads.run(partial(_write, file, bytes(buffer), self._folder))
                buffer.clear()
        await threads.run(partial(_write, file, bytes(buffer), self._folder))


async def _next_chunk(stream: AsyncIterator[bytes], deadline: float) -> bytes | None:
    try:
        with anyio.fail_after(max(0.0, min(_SILENCE_SECONDS, deadline - time.monotonic()))):
            return await anext(stream, None)
    except TimeoutError:
        # The rest of the body is not read.
        raise HTTPException(
            HTTPStatus.REQUEST_TIMEOUT,
            "the upload did not arrive in time; retry over a faster connection, or split it into smaller files",
            headers={"Connection": "close"},
        ) from None


def _write(file: "SpooledTemporaryFile[bytes]", data: bytes, folder: Path) -> None:
    with storage_errors(folder):
        file.write(data)


def _pieces(file: "SpooledTemporaryFile[bytes]", folder: Path) -> Iterator[bytes]:
    with storage_errors(folder):
        file.seek(0)
        while piece := file.read(_BUFFER_BYTES):
            yield piece
