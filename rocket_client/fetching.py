"""Artifacts into a folder: what is there already stays, what broke off goes on, and every file is verified.

A file in the making lies beside its target as `NAME.part`, and becomes the target in one step once its hash is right.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

import httpx2

from rocket_client.backoff import Patience
from rocket_client.errors import (
    ClientError,
    DigestMismatchError,
    FolderBusyError,
    NotEnoughDiskError,
    ServerUnreachableError,
    UnsafeNameError,
)
from rocket_client.resources import Artifact
from rocket_client.transport import Transport

_PART = ".part"
_LONGEST_SILENCE_SECONDS = 60.0
_PARTIAL_CONTENT = 206


class Outcome(StrEnum):
    """How a file came to be what it is."""

    KEPT = "kept"
    DOWNLOADED = "downloaded"
    REPLACED = "replaced"


@dataclass(frozen=True, kw_only=True, slots=True)
class DownloadedFile:
    """A verified file.

    Attributes:
        artifact: what the server says of it.
        path: where it lies.
        outcome: `kept` if it was there, `replaced` if another was.
    """

    artifact: Artifact
    path: Path
    outcome: Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class DownloadProgress:
    """How far a download is.

    Attributes:
        name: the artifact at hand.
        done: bytes that are there, of all artifacts.
        total: bytes of all artifacts.
        received: bytes that came over the network.
    """

    name: str
    done: int
    total: int
    received: int


def fetch_artifacts(
    transport: Transport,
    path: str,
    artifacts: Sequence[Artifact],
    folder: Path,
    *,
    patience: float,
    on_progress: Callable[[DownloadProgress], None],
) -> list[DownloadedFile]:
    """Brings artifacts into a folder, which is made if need be.

    Args:
        transport: the way to the server.
        path: of the job's artifacts on the server.
        artifacts: which ones.
        folder: their names are taken as paths below it.
        patience: seconds without a byte before giving up.
        on_progress: told after each piece.

    Returns:
        The files, each verified by its hash, in the given order.

    Raises:
        UnsafeNameError: a name leads out of the folder.
        FolderBusyError: another download writes to the folder.
        NotEnoughDiskError: they do not fit.
        DigestMismatchError: a file is not what the server announced.
        ClientError: the server cannot be reached, or refuses.
        OSError: a file cannot be written.
    """
    targets = safe_paths([artifact.name for artifact in artifacts], folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _only_download(folder):
        download = _Download(transport, path, artifacts, patience=patience, on_progress=on_progress)
        kept = {
            artifact.name: download.is_there(artifact, target)
            for artifact, target in zip(artifacts, targets, strict=True)
            if target.exists()
        }
        missing = [pair for pair in zip(artifacts, targets, strict=True) if not kept.get(pair[0].name)]
        _require_space(folder, missing)
        for artifact, target in missing:
            download.fetch(artifact, target)
    outcomes = {True: Outcome.KEPT, False: Outcome.REPLACED, None: Outcome.DOWNLOADED}
    return [
        DownloadedFile(artifact=artifact, path=target, outcome=outcomes[kept.get(artifact.name)])
        for artifact, target in zip(artifacts, targets, strict=True)
    ]


def safe_paths(names: Sequence[str], folder: Path) -> list[Path]:
    """The file of each name below a folder.

    Raises:
        UnsafeNameError: a name leads out of the folder, or two names lead to one file.
    """
    paths = []
    for name in names:
        parts = name.split("/")
        if not name.isprintable() or "\\" in name or any(part in {"", ".", ".."} for part in parts):
            raise UnsafeNameError(
                f"the server names an artifact {name!r}, which is no path below {folder}; not downloaded"
            )
        paths.append(folder.joinpath(*parts))
    files = {str(path) for path in paths} | {str(path) + _PART for path in paths}
    inner = {str(parent) for path in paths for parent in path.parents}
    if len(files) != 2 * len(names) or files & inner:
        raise UnsafeNameError(f"the server gives two artifacts one name in {folder}; nothing was downloaded")
    return paths


class _Download:
    """The artifacts of one job on their way."""

    def __init__(
        self,
        transport: Transport,
        path: str,
        artifacts: Sequence[Artifact],
        *,
        patience: float,
        on_progress: Callable[[DownloadProgress], None],
    ) -> None:
        self._transport = transport
        self._path = path
        self._patience = patience
        self._on_progress = on_progress
        self._total = sum(artifact.size for artifact in artifacts)
        self._finished = 0
        self._received = 0

    def is_there(self, artifact: Artifact, target: Path) -> bool:
        """Whether the target is the artifact already."""
        if not target.is_file() or target.stat().st_size != artifact.size or _sha256(target) != artifact.sha256:
            return False
        self._finish(artifact)
        return True

    def fetch(self, artifact: Artifact, target: Path) -> None:
        """Brings one artifact to its target."""
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + _PART)
        is_resumed = part.exists()
        found = self._complete(artifact, part)
        if found != artifact.sha256 and is_resumed:
            # What an earlier download left may be anything.
            part.unlink()
            found = self._complete(artifact, part)
        if found != artifact.sha256:
            part.unlink()
            raise DigestMismatchError(
                f"{artifact.name} has the SHA-256 {found} instead of {artifact.sha256} and was removed; try again, and "
                "if that does not help, the file is damaged on the server or on the way"
            )
        part.replace(target)
        self._finish(artifact)

    def _complete(self, artifact: Artifact, part: Path) -> str:
        """Adds to a part what it lacks, over as many connections as it takes; returns the hash of what is on disk."""
        left = Patience(self._patience)
        with _named_errors(part), part.open("ab") as stream:
            if stream.tell() > artifact.size:
                _empty(stream)
            while stream.tell() < artifact.size:
                try:
                    with self._answer(artifact, stream.tell()) as response:
                        self._receive(artifact, response, stream, left)
                except ClientError as error:
                    self._transport.wait_out(error, left)
            stream.flush()
            os.fsync(stream.fileno())
        return _sha256(part)

    def _answer(self, artifact: Artifact, start: int) -> AbstractContextManager[httpx2.Response]:
        # The server says which content it has by its hash; the store that it may name knows no such ETag.
        etag = f'"sha256-{artifact.sha256}"'
        return self._transport.open_file(
            self._url(artifact), start=start, etag=etag, read_seconds=_LONGEST_SILENCE_SECONDS
        )

    def _receive(self, artifact: Artifact, response: httpx2.Response, stream: BinaryIO, left: Patience) -> None:
        """Appends what an answer brings."""
        if response.status_code != _PARTIAL_CONTENT:
            _empty(stream)
        elif not response.headers.get("content-range", "").startswith(f"bytes {stream.tell()}-"):
            raise self._transport.unexpected("another range of a file than was asked for")
        for piece in response.iter_raw():
            left.renew()
            if stream.tell() + len(piece) > artifact.size:
                _empty(stream)
                raise DigestMismatchError(
                    f"{artifact.name} is larger than the {artifact.size} bytes that the server announced; try again"
                )
            stream.write(piece)
            self._received += len(piece)
            self._tell(artifact, stream.tell())
        if stream.tell() < artifact.size:
            raise ServerUnreachableError(self._transport.server, "a file ended early", may_have_arrived=True)

    def _url(self, artifact: Artifact) -> str:
        return f"{self._path}/{quote(artifact.name, safe='/')}"

    def _finish(self, artifact: Artifact) -> None:
        self._finished += artifact.size
        self._tell(artifact, 0)

    def _tell(self, artifact: Artifact, done: int) -> None:
        self._on_progress(
            DownloadProgress(name=artifact.name, done=self._finished + done, total=self._total, received=self._received)
        )


@contextmanager
def _only_download(folder: Path) -> Iterator[None]:
    """Holds the folder, so that no two downloads write to one part."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderBusyError(
                f"another download writes to {folder}; wait for it, or choose another folder"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _require_space(folder: Path, missing: Sequence[tuple[Artifact, Path]]) -> None:
    parts = [target.with_name(target.name + _PART) for _, target in missing]
    present = sum(part.stat().st_size for part in parts if part.exists())
    needed = sum(artifact.size for artifact, _ in missing) - present
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise NotEnoughDiskError(
            f"{needed:,} more bytes are needed in {folder}, and {free:,} are free; make room there"
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _empty(stream: BinaryIO) -> None:
    if stream.tell() > 0:
        stream.seek(0)
        stream.truncate()


@contextmanager
def _named_errors(file: Path) -> Iterator[None]:
    """Adds to errors of writing which file it was: the system tells that of opening only."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(file)) from error
        raise
