"""State machine of a download: what exists, what to request next, and verification. No network I/O.

A partial file is next to its destination as `NAME.part`, and is renamed once its hash is right.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

import httpx2

from rocket_client._retry import RetryBudget
from rocket_client._wire import Request, Wire, file_request
from rocket_client.errors import (
    DigestMismatchError,
    FolderBusyError,
    NotEnoughDiskError,
    UnsafeNameError,
)
from rocket_client.models import Artifact
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DownloadProgress:
    """Progress of a download.

    Attributes:
        name: the current artifact.
        done: bytes on disk, of all artifacts.
        total: bytes of all artifacts.
        received: bytes received over the network.
    """

    name: str
    done: int
    total: int
    received: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DownloadRequest:
    """A request for a download.

    Attributes:
        path: path of the job's artifacts on the server.
        artifacts: the artifacts.
        folder: folder that the names of artifacts are relative to.
        patience: seconds without a byte before giving up.
        on_progress: called after each chunk.
    """

    path: str
    artifacts: Sequence[Artifact]
    folder: Path
    patience: float
    on_progress: Callable[[DownloadProgress], None]


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


class FileDownload:
    """Download state of one artifact.

    Attributes:
        artifact: its description by the server.
        retry_budget: how much longer the server may be silent.
        done: bytes on disk.
        received: bytes received over the network.
    """

    def __init__(self, wire: Wire, request: DownloadRequest, artifact: Artifact, path: Path) -> None:
        self.artifact = artifact
        self.retry_budget = RetryBudget(request.patience)
        self.done = 0
        self.received = 0
        self._wire = wire
        self._url = f"{request.path}/{quote(artifact.name, safe='/')}"
        self._path = path
        self._part = path.with_name(path.name + _PART)
        self._stream: BinaryIO | None = None
        self._is_resumed = False
        self._outcome = Outcome.DOWNLOADED

    @property
    def exists(self) -> bool:
        """Whether the file existed already."""
        return self._outcome is Outcome.KEPT

    def check_existing(self) -> None:
        """Check whether the file exists already."""
        if not self._path.exists():
            return
        has_size = self._path.is_file() and self._path.stat().st_size == self.artifact.size
        if has_size and _sha256(self._path) == self.artifact.sha256:
            self._outcome, self.done = Outcome.KEPT, self.artifact.size
        else:
            self._outcome = Outcome.REPLACED

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
                    self._part.replace(self._path)
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

    def result(self) -> DownloadedFile:
        """Return the downloaded file."""
        return DownloadedFile(artifact=self.artifact, path=self._path, outcome=self._outcome)

    def close(self) -> None:
        """Close the part, which is kept for the next download."""
        if self._stream is not None:
            with _named_errors(self._part):
                self._stream.close()

    def _open(self) -> BinaryIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
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


class DownloadSession:
    """Download of all artifacts of a request."""

    def __init__(self, wire: Wire, request: DownloadRequest, paths: Sequence[Path]) -> None:
        self._request = request
        pairs = zip(request.artifacts, paths, strict=True)
        self.files = [FileDownload(wire, request, artifact, path) for artifact, path in pairs]

    def missing(self) -> list[FileDownload]:
        """Return the files that must be downloaded; raises NotEnoughDiskError if they do not fit."""
        missing = [file for file in self.files if not file.exists]
        needed = sum(file.missing_bytes() for file in missing)
        free = shutil.disk_usage(self._request.folder).free
        if needed > free:
            raise NotEnoughDiskError(
                f"the download needs {needed:,} more bytes in {self._request.folder}, but only {free:,} are "
                "free; free some space"
            )
        return missing

    def report(self, file: FileDownload) -> None:
        """Report the progress."""
        self._request.on_progress(
            DownloadProgress(
                name=file.artifact.name,
                done=sum(file.done for file in self.files),
                total=sum(file.artifact.size for file in self.files),
                received=sum(file.received for file in self.files),
            )
        )

    def results(self) -> list[DownloadedFile]:
        """Return the downloaded files."""
        return [file.result() for file in self.files]

    def close(self) -> None:
        """Close all parts."""
        for file in self.files:
            file.close()


@contextmanager
def open_session(wire: Wire, request: DownloadRequest) -> Iterator[DownloadSession]:
    """Yield a download into a folder, which is created if necessary and locked against other downloads.

    Raises:
        UnsafeNameError: a name leads out of the folder.
        FolderBusyError: another download writes to the folder.
    """
    paths = safe_paths([artifact.name for artifact in request.artifacts], request.folder)
    request.folder.mkdir(parents=True, exist_ok=True)
    with _only_download(request.folder), closing(DownloadSession(wire, request, paths)) as session:
        yield session


@contextmanager
def _only_download(folder: Path) -> Iterator[None]:
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
