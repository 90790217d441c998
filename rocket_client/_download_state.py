"""State machine of a download: what exists, what to request next, and verification. No network I/O.

A partial file is next to its target as `NAME.part`, and is renamed to the target once its hash is right.
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

from rocket_client._retry import Patience
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
class Order:
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
        raise UnsafeNameError(f"the server gives two artifacts one name in {folder}; nothing was downloaded")
    return paths


class Target:
    """Download state of one artifact.

    Attributes:
        artifact: its description by the server.
        left: how much longer the server may be silent.
        done: bytes on disk.
        received: bytes received over the network.
    """

    def __init__(self, wire: Wire, order: Order, artifact: Artifact, path: Path) -> None:
        self.artifact = artifact
        self.left = Patience(order.patience)
        self.done = 0
        self.received = 0
        self._wire = wire
        self._url = f"{order.path}/{quote(artifact.name, safe='/')}"
        self._path = path
        self._part = path.with_name(path.name + _PART)
        self._stream: BinaryIO | None = None
        self._is_resumed = False
        self._outcome = Outcome.DOWNLOADED

    @property
    def is_there(self) -> bool:
        """Whether the file existed already."""
        return self._outcome is Outcome.KEPT

    def look(self) -> None:
        """Check whether the file exists already."""
        if not self._path.exists():
            return
        is_whole = self._path.is_file() and self._path.stat().st_size == self.artifact.size
        if is_whole and _sha256(self._path) == self.artifact.sha256:
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
                    return self._request(stream.tell())
                found = self._hash_of_whole(stream)
                if found == self.artifact.sha256:
                    self._part.replace(self._path)
                    return None
                self._part.unlink()
                # A part left by an earlier download may be anything; it is downloaded again.
                if not self._is_resumed:
                    raise DigestMismatchError(
                        f"{self.artifact.name} has the SHA-256 {found} instead of {self.artifact.sha256} and was "
                        "removed; try again, and if that does not help, the file is damaged on the server or on the way"
                    )

    def expect(self, response: httpx2.Response) -> None:
        """Prepare for the body of a response; raises UnexpectedAnswerError for a different range."""
        stream = self._opened()
        if response.status_code != _PARTIAL_CONTENT:
            self._empty(stream)
        elif not response.headers.get("content-range", "").startswith(f"bytes {stream.tell()}-"):
            raise self._wire.unexpected("another range of a file than was asked for")

    def write(self, piece: bytes) -> None:
        """Append a chunk; raises DigestMismatchError if the file becomes larger than announced."""
        stream = self._opened()
        self.left.renew()
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

    def require_end(self) -> None:
        """Raise ServerUnreachableError if the response ended before the file did."""
        if self.done < self.artifact.size:
            raise self._wire.broken_off("a file ended early")

    def file(self) -> DownloadedFile:
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
        self.left.renew()
        return stream

    def _opened(self) -> BinaryIO:
        assert self._stream is not None, "nothing was asked for"
        return self._stream

    def _request(self, start: int) -> Request:
        # The server's ETag is the hash of the content; the store that it may redirect to does not know this ETag.
        etag = f'"sha256-{self.artifact.sha256}"'
        return file_request(self._url, start=start, etag=etag, read_seconds=_LONGEST_SILENCE_SECONDS)

    def _hash_of_whole(self, stream: BinaryIO) -> str:
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


class Download:
    """All targets of an order."""

    def __init__(self, wire: Wire, order: Order, paths: Sequence[Path]) -> None:
        self._order = order
        pairs = zip(order.artifacts, paths, strict=True)
        self.targets = [Target(wire, order, artifact, path) for artifact, path in pairs]

    def missing(self) -> list[Target]:
        """Return the targets that must be downloaded; raises NotEnoughDiskError if they do not fit."""
        found = [target for target in self.targets if not target.is_there]
        needed = sum(target.missing_bytes() for target in found)
        free = shutil.disk_usage(self._order.folder).free
        if needed > free:
            raise NotEnoughDiskError(
                f"{needed:,} more bytes are needed in {self._order.folder}, and {free:,} are free; make room there"
            )
        return found

    def tell(self, target: Target) -> None:
        """Report the progress."""
        self._order.on_progress(
            DownloadProgress(
                name=target.artifact.name,
                done=sum(one.done for one in self.targets),
                total=sum(one.artifact.size for one in self.targets),
                received=sum(one.received for one in self.targets),
            )
        )

    def files(self) -> list[DownloadedFile]:
        """Return the downloaded files."""
        return [target.file() for target in self.targets]

    def close(self) -> None:
        """Close all parts."""
        for target in self.targets:
            target.close()


@contextmanager
def begun(wire: Wire, order: Order) -> Iterator[Download]:
    """Yield a download into a folder, which is created if necessary and locked against other downloads.

    Raises:
        UnsafeNameError: a name leads out of the folder.
        FolderBusyError: another download writes to the folder.
    """
    paths = safe_paths([artifact.name for artifact in order.artifacts], order.folder)
    order.folder.mkdir(parents=True, exist_ok=True)
    with _only_download(order.folder), closing(Download(wire, order, paths)) as download:
        yield download


@contextmanager
def _only_download(folder: Path) -> Iterator[None]:
    """Lock the folder, so that no two downloads write to one part."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder))
        except BlockingIOError:
            raise FolderBusyError(
                f"another download writes to {folder}; wait for it, or choose another folder"
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
