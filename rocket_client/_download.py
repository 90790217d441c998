"""Downloads of artifacts into a folder: existing files are kept, partial ones resumed, and all are verified.

A partial file is next to its destination as `NAME.part`, and is renamed once its hash is right.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

import httpx2

from rocket_client._retry import RetryBudget
from rocket_client._transport import Transport
from rocket_client._wire import Request, TransferProgress, Wire, file_request
from rocket_client.errors import (
    ClientError,
    DigestMismatchError,
    FolderBusyError,
    NotEnoughDiskError,
    NothingToDownloadError,
    UnsafeNameError,
)
from rocket_client.models import Artifact, Job
from rocket_core.engines import current_name
from rocket_core.system.files import locked

_PART = ".part"
_LONGEST_SILENCE_SECONDS = 60.0
_PARTIAL_CONTENT = 206


class Outcome(StrEnum):
    """Outcome of a download for one file."""

    KEPT = "kept"
    DOWNLOADED = "downloaded"
    REPLACED = "replaced"


@dataclass(frozen=True, kw_only=True, slots=True)
class DownloadedFile:
    """A verified file.

    Attributes:
        artifact: its description by the server.
        path: path of the file.
        outcome: `kept` if it existed, `replaced` if a different file did, else `downloaded`.
    """

    artifact: Artifact
    path: Path
    outcome: Outcome


class FileDownload:
    """Download state of one artifact.

    Attributes:
        artifact: its description by the server.
        path: path of the file.
        outcome: what has become of the file; `downloaded` until `check_existing` finds one.
        retry_budget: how much longer the server may be silent.
        done: bytes on disk.
        received: bytes received over the network.
    """

    def __init__(self, wire: Wire, url: str, artifact: Artifact, path: Path, patience: float) -> None:
        self.artifact = artifact
        self.retry_budget = RetryBudget(patience)
        self.done = 0
        self.received = 0
        self.path = path
        self.outcome = Outcome.DOWNLOADED
        self._wire = wire
        self._url = url
        self._part = path.with_name(path.name + _PART)
        self._stream: BinaryIO | None = None
        self._is_resumed = False

    def check_existing(self) -> None:
        """Check whether the file exists already."""
        if not self.path.exists():
            return
        has_size = self.path.is_file() and self.path.stat().st_size == self.artifact.size
        if has_size and _sha256(self.path) == self.artifact.sha256:
            self.outcome, self.done = Outcome.KEPT, self.artifact.size
        else:
            self.outcome = Outcome.REPLACED

    def missing_bytes(self) -> int:
        """Return the number of bytes that are not on the disk yet."""
        present = self._part.stat().st_size if self._part.exists() else 0
        return max(0, self.artifact.size - present)

    def next_request(self) -> Request | None:
        """Return the request for the missing bytes; None once the file is complete, verified and in its place.

        Raises:
            DigestMismatchError: the file is complete, but not what the server announced.
        """
        with _named_errors(self._part):
            while True:
                stream = self._stream or self._open()
                if stream.tell() < self.artifact.size:
                    return self._http_request(stream.tell())
                digest = self._digest(stream)
                if digest == self.artifact.sha256:
                    self._part.replace(self.path)
                    return None
                self._part.unlink()
                # A part left by an earlier download may be anything; it is downloaded again.
                if not self._is_resumed:
                    raise DigestMismatchError(
                        f"{self.artifact.name} has the SHA-256 {digest} instead of {self.artifact.sha256} and was "
                        "removed; try again; if that does not help, the file is damaged on the server or in transit"
                    )

    def expect(self, response: httpx2.Response) -> None:
        """Prepare for the body of a response; raises UnexpectedAnswerError for a different range."""
        stream = self._opened()
        if response.status_code != _PARTIAL_CONTENT:
            self._empty(stream)
        elif not response.headers.get("content-range", "").startswith(f"bytes {stream.tell()}-"):
            raise self._wire.unexpected("a different range of a file than requested")

    def write(self, piece: bytes) -> None:
        """Append a chunk; raises DigestMismatchError if the file becomes larger than announced."""
        stream = self._opened()
        self.retry_budget.reset()
        with _named_errors(self._part):
            if stream.tell() + len(piece) > self.artifact.size:
                self._empty(stream)
                raise DigestMismatchError(
                    f"{self.artifact.name} is larger than the {self.artifact.size} bytes that the server announced; "
                    "try again"
                )
            stream.write(piece)
        self.received += len(piece)
        self.done = stream.tell()

    def check_complete(self) -> None:
        """Raise ServerUnreachableError if the response ended before the file did."""
        if self.done < self.artifact.size:
            raise self._wire.broken_off("a file ended early")

    def close(self) -> None:
        """Close the part, which is kept for the next download."""
        if self._stream is not None:
            with _named_errors(self._part):
                self._stream.close()

    def _open(self) -> BinaryIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._is_resumed = self._part.exists()
        stream = self._stream = self._part.open("ab")
        if stream.tell() > self.artifact.size:
            self._empty(stream)
        self.done = stream.tell()
        self.retry_budget.reset()
        return stream

    def _opened(self) -> BinaryIO:
        assert self._stream is not None, "no request was made"
        return self._stream

    def _http_request(self, start: int) -> Request:
        # The server's ETag is the hash of the content; the store that it may redirect to does not know this ETag.
        etag = f'"sha256-{self.artifact.sha256}"'
        return file_request(self._url, start=start, etag=etag, read_seconds=_LONGEST_SILENCE_SECONDS)

    def _digest(self, stream: BinaryIO) -> str:
        stream.flush()
        os.fsync(stream.fileno())
        stream.close()
        self._stream = None
        return _sha256(self._part)

    def _empty(self, stream: BinaryIO) -> None:
        if stream.tell() > 0:
            stream.seek(0)
            stream.truncate()
        self.done = 0


async def fetch_artifacts(
    transport: Transport,
    path: str,
    artifacts: Sequence[Artifact],
    folder: Path,
    *,
    patience: float,
    on_progress: Callable[[TransferProgress], None],
) -> list[DownloadedFile]:
    """Download artifacts into a folder, which is created if necessary.

    Args:
        transport: connection to the server.
        path: path of the job's artifacts on the server.
        artifacts: the artifacts.
        folder: folder that the names of artifacts are relative to.
        patience: seconds without a byte before giving up.
        on_progress: called after each chunk.

    Returns:
        The files, each verified by its hash, in the given order.

    Raises:
        UnsafeNameError: a name leads out of the folder.
        FolderBusyError: another download writes to the folder.
        NotEnoughDiskError: the artifacts do not fit on the disk.
        DigestMismatchError: a file is not what the server announced.
        ClientError: the server cannot be reached, or refuses.
        OSError: a file cannot be written.
    """
    paths = safe_paths([artifact.name for artifact in artifacts], folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = [
        FileDownload(transport.wire, f"{path}/{quote(artifact.name, safe='/')}", artifact, file, patience)
        for artifact, file in zip(artifacts, paths, strict=True)
    ]

    def report(name: str) -> None:
        on_progress(
            TransferProgress(
                name=name,
                done=sum(file.done for file in files),
                total=sum(artifact.size for artifact in artifacts),
                received=sum(file.received for file in files),
            )
        )

    with only_download(folder), ExitStack() as stack:
        for file in files:
            stack.callback(file.close)
            await transport.connections.in_thread(file.check_existing)
            report(file.artifact.name)
        missing = [file for file in files if file.outcome is not Outcome.KEPT]
        _check_space(missing, folder)
        for file in missing:
            await _fetch(transport, file, partial(report, file.artifact.name))
        return [DownloadedFile(artifact=file.artifact, path=file.path, outcome=file.outcome) for file in files]


async def _fetch(transport: Transport, file: FileDownload, report: Callable[[], None]) -> None:
    connections = transport.connections
    while (request := await connections.in_thread(file.next_request)) is not None:
        try:
            async with transport.open_file(request) as response:
                file.expect(response)
                async for piece in connections.pieces(response):
                    await connections.in_thread(file.write, piece)
                    report()
            file.check_complete()
        except ClientError as error:
            await transport.wait_out(error, file.retry_budget)
    report()


def _check_space(missing: Sequence[FileDownload], folder: Path) -> None:
    needed, free = sum(file.missing_bytes() for file in missing), shutil.disk_usage(folder).free
    if needed > free:
        raise NotEnoughDiskError(
            f"the download needs {needed:,} more bytes in {folder}, but only {free:,} are free; free some space"
        )


def nothing_to_download(job: Job) -> NothingToDownloadError:
    """Return the error for a job without artifacts."""
    return NothingToDownloadError(f"{job.id} is {job.status}; only a job that has succeeded has artifacts")


def choose_artifacts(job_id: str, artifacts: Sequence[Artifact], exports: Sequence[str]) -> list[Artifact]:
    """Return the artifacts of some exports, and those outside of any export; all artifacts if no export is named.

    Raises:
        NothingToDownloadError: the job has no such export.
    """
    exports = [str(current_name(export)) for export in exports]
    available = {artifact.name.partition("/")[0] for artifact in artifacts if "/" in artifact.name}
    for export in exports:
        if export not in available:
            raise NothingToDownloadError(
                f"{job_id} has no export {export!r}; it has {' and '.join(sorted(available)) or 'none'}"
            )
    chosen = set(exports or available)
    return [artifact for artifact in artifacts if "/" not in artifact.name or artifact.name.split("/")[0] in chosen]


def safe_paths(names: Sequence[str], folder: Path) -> list[Path]:
    """Return the path of each name below a folder.

    Raises:
        UnsafeNameError: a name leads out of the folder, or two names lead to one file.
    """
    paths = []
    for name in names:
        parts = name.split("/")
        if not name.isprintable() or "\\" in name or any(part in {"", ".", ".."} for part in parts):
            raise UnsafeNameError(
                f"the server names an artifact {name!r}, which is not a path below {folder}; not downloaded"
            )
        paths.append(folder.joinpath(*parts))
    files = {str(path) for path in paths} | {str(path) + _PART for path in paths}
    inner = {str(parent) for path in paths for parent in path.parents}
    if len(files) != 2 * len(names) or files & inner:
        raise UnsafeNameError(f"two artifacts would be the same file in {folder}; nothing was downloaded")
    return paths


@contextmanager
def only_download(folder: Path) -> Iterator[None]:
    """Lock the folder, so that no two downloads write to one part."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder))
        except BlockingIOError:
            raise FolderBusyError(
                f"another download is writing to {folder}; wait for it, or choose another folder"
            ) from None
        yield


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _named_errors(file: Path) -> Iterator[None]:
    """Add the file's name to errors from writing; the system names it only in errors from opening."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(file)) from error
        raise
