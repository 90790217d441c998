"""Responses with files of the artifact store: whole or in ranges (RFC 9110, 14), in constant memory."""

import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from anyio import CancelScope
from starlette import status
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from app.api.tenant_shares import Threads

# Numbers with more digits than any file needs, and more ranges than any client needs, do not match.
_RANGE = r"\s*(\d{1,18}-\d{0,18}|-\d{1,18})\s*"
_RANGES = re.compile(rf"bytes={_RANGE}(,{_RANGE}){{0,7}}")


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class ByteRange:
    """The bytes [start, stop)."""

    start: int
    stop: int


def requested_ranges(header: str | None, size: int) -> tuple[ByteRange, ...]:
    """Return the parts of a file that a client asks for, in order and without overlap; empty means the whole file.

    Args:
        header: the request's `Range`; a malformed one is ignored, as RFC 9110 requires.
        size: size of the file in bytes.

    Raises:
        HTTPException: 416, all ranges are beyond the end of the file.
    """
    if header is None or not _RANGES.fullmatch(header):
        return ()
    bounds = [part.strip().partition("-") for part in header.partition("=")[2].split(",")]
    if any(first and last and int(first) > int(last) for first, _, last in bounds):
        return ()
    ranges = [
        ByteRange(start=int(first), stop=min(int(last) + 1, size) if last else size)
        if first
        else ByteRange(start=max(size - int(last), 0), stop=size)
        for first, _, last in bounds
    ]
    present = sorted(part for part in ranges if part.start < part.stop)
    if not present:
        raise HTTPException(
            status.HTTP_416_RANGE_NOT_SATISFIABLE,
            f"the range is beyond the file's {size} bytes",
            headers={"Content-Range": f"bytes */{size}"},
        )
    return tuple(_merged(present))


def _merged(ranges: Sequence[ByteRange]) -> list[ByteRange]:
    merged = list(ranges[:1])
    for part in ranges[1:]:
        if part.start <= merged[-1].stop:
            merged[-1] = ByteRange(start=merged[-1].start, stop=max(merged[-1].stop, part.stop))
        else:
            merged.append(part)
    return merged


class StoredFileResponse(Response):
    """A file of the artifact store, or ranges of it.

    A store error before the first byte becomes an error response; a later one closes the connection, so that no client
    takes a partial file for the whole.

    Args:
        read: returns the bytes from one position up to another, in pieces.
        size: size of the file in bytes.
        ranges: what to send; empty means the whole.
        headers: further headers.
        media_type: media type of the file.
        threads: threads that read the file.
    """

    def __init__(
        self,
        read: Callable[[int, int], Iterator[bytes]],
        size: int,
        ranges: Sequence[ByteRange],
        *,
        headers: Mapping[str, str],
        media_type: str,
        threads: Threads,
    ) -> None:
        self._read = read
        self._size = size
        self._threads = threads
        self._pieces: list[bytes | ByteRange] = [ByteRange(start=0, stop=size)]
        self.status_code = status.HTTP_206_PARTIAL_CONTENT if ranges else status.HTTP_200_OK
        self.background = None
        more = {"Accept-Ranges": "bytes"}
        if len(ranges) == 1:
            self._pieces = [*ranges]
            more["Content-Range"] = _content_range(ranges[0], size)
        elif ranges:
            boundary = secrets.token_hex(16)
            self._pieces = _parts(ranges, size, boundary, media_type)
            media_type = f"multipart/byteranges; boundary={boundary}"
        length = sum(len(piece) if isinstance(piece, bytes) else piece.stop - piece.start for piece in self._pieces)
        # Set directly: the framework would add a charset to text types.
        self.init_headers({**headers, **more, "Content-Type": media_type, "Content-Length": str(length)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        if scope["method"] == "HEAD":
            await self._threads.run(self._check_end)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": b""})
            return
        async with aclosing(self._chunks()) as chunks:
            first = await anext(chunks, b"")
            answer = StreamingResponse(_chained(first, chunks), self.status_code)
            answer.raw_headers = self.raw_headers
            await answer(scope, receive, send)

    def _check_end(self) -> None:
        """Read the last byte, so that a store error is raised before the headers are sent."""
        for _ in self._read(max(self._size - 1, 0), self._size):
            pass

    async def _chunks(self) -> AsyncGenerator[bytes]:
        content = self._content()
        try:
            while chunk := await self._threads.run(next, content, b""):
                yield chunk
        finally:
            # A client that disconnects leaves the store's response half-read.
            with CancelScope(shield=True):
                await self._threads.run(content.close)

    def _content(self) -> Generator[bytes]:
        for piece in self._pieces:
            if isinstance(piece, bytes):
                yield piece
            else:
                yield from self._read(piece.start, piece.stop)


def _content_range(part: ByteRange, size: int) -> str:
    return f"bytes {part.start}-{part.stop - 1}/{size}"


def _parts(ranges: Sequence[ByteRange], size: int, boundary: str, media_type: str) -> list[bytes | ByteRange]:
    pieces: list[bytes | ByteRange] = []
    for part in ranges:
        head = f"--{boundary}\r\nContent-Type: {media_type}\r\nContent-Range: {_content_range(part, size)}\r\n\r\n"
        pieces += [head.encode("latin-1"), part, b"\r\n"]
    return [*pieces, f"--{boundary}--\r\n".encode()]


async def _chained(first: bytes, others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for chunk in others:
        yield chunk
