"""Steps of a model's upload: what to send next, given what has arrived. No network I/O."""

import base64
import hashlib
import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rocket_client._requests import model_path
from rocket_client._wire import Call, TransferProgress
from rocket_client.errors import InvalidArgumentError
from rocket_client.models import ReceivedFile, UploadedFile, UploadedModel
from rocket_core.errors import RocketError
from rocket_core.inspection.files.model_parts import is_weights, list_parts

# Small enough for a progress that moves, and to be sent again after an interruption.
_PIECE_BYTES = 2**24
_LENGTH_BYTES = 8
# Reading the headers of a large model, and storing a piece elsewhere, may take longer than other requests.
_JUDGE_SECONDS = 60.0
_STORE_SECONDS = 120.0

Steps = Generator[Call[Any], Any, UploadedModel]
"""Requests to send in order; each gets the answer to it, and the model is returned in the end."""


def upload_steps(folder: Path, name: str | None, on_progress: Callable[[TransferProgress], None]) -> Steps:
    """Yield the requests that upload a model, or the rest of it.

    Args:
        folder: the model.
        name: its name on the server; None takes that of the folder.
        on_progress: called after each piece.

    Returns:
        The complete model.

    Raises:
        InvalidArgumentError: the folder holds no model that can be compressed, or another than has arrived.
        OSError: a file cannot be read.
    """
    chosen = name or _name_of(folder)
    try:
        paths = list_parts(folder)
    except RocketError as error:
        raise InvalidArgumentError(str(error)) from error
    sizes = {path: (folder / path).stat().st_size for path in paths}
    model: UploadedModel = yield announce_model(chosen, sizes)
    upload = _Upload(folder, chosen, model, on_progress)
    # Small files first, then the headers: a model that cannot be compressed is refused before its weights are sent.
    for path in paths:
        yield from upload.send(path, _head_bytes(folder / path) if is_weights(path) else sizes[path])
    yield check_model(chosen)
    for path in paths:
        yield from upload.send(path, sizes[path])
    done: UploadedModel = yield get_model(chosen)
    return done


def advance(steps: Steps, answer: object) -> Call[Any] | UploadedModel:
    """Return the next request, given the answer to the last one, or the model after the last one."""
    try:
        return steps.send(answer)
    except StopIteration as end:
        model = end.value
        assert isinstance(model, UploadedModel)
        return model


def announce_model(name: str, sizes: Mapping[str, int]) -> Call[UploadedModel]:
    """Return the request that announces a model to upload."""
    files = [{"path": path, "size": size} for path, size in sizes.items()]
    return Call(method="POST", path="/models", json={"name": name, "files": files}, answer=UploadedModel)


def get_model(name: str) -> Call[UploadedModel]:
    """Return the request for an uploaded model."""
    return Call(method="GET", path=model_path(name), answer=UploadedModel)


def get_file(name: str, path: str) -> Call[UploadedFile]:
    """Return the request for a file of an uploaded model, with what has arrived of it."""
    return Call(method="GET", path=model_path(name, "files", quote(path)), answer=UploadedFile)


def check_model(name: str) -> Call[UploadedModel]:
    """Return the request that judges a model by its headers."""
    return Call(method="POST", path=model_path(name, "check"), read_seconds=_JUDGE_SECONDS, answer=UploadedModel)


def save_piece(name: str, path: str, content: bytes, *, start: int, total: int, digest: str) -> Call[ReceivedFile]:
    """Return the request that appends bytes to a file of a model."""
    return Call(
        method="PUT",
        path=model_path(name, "files", quote(path)),
        content=content,
        headers={
            "Content-Type": "application/octet-stream",
            "Content-Range": f"bytes {start}-{start + len(content) - 1}/{total}",
            "Content-Digest": digest,
        },
        read_seconds=_STORE_SECONDS,
        answer=ReceivedFile,
    )


class _Upload:
    def __init__(
        self, folder: Path, name: str, model: UploadedModel, on_progress: Callable[[TransferProgress], None]
    ) -> None:
        self._folder = folder
        self._name = name
        self._files = {file.path: file for file in model.files}
        self._received = {file.path: file.received for file in model.files}
        self._unchecked = {file.path for file in model.files if file.received}
        self._total = model.size
        self._piece_bytes = min(model.piece_bytes, _PIECE_BYTES)
        self._on_progress = on_progress
        self._sent = 0

    def send(self, path: str, stop: int) -> Generator[Call[Any], Any, None]:
        """Yield the requests after which the server has a file up to an offset."""
        start = self._received[path]
        if start >= stop:
            self._note(path)
            return
        if path in self._unchecked:
            arrived: UploadedFile = yield get_file(self._name, path)
            self._check_arrived(arrived)
            self._unchecked.remove(path)
        with (self._folder / path).open("rb") as stream:
            stream.seek(start)
            while start < stop:
                content = stream.read(min(self._piece_bytes, stop - start))
                if not content:
                    raise InvalidArgumentError(f"{self._folder / path} became shorter while it was uploaded")
                received: ReceivedFile = yield save_piece(
                    self._name, path, content, start=start, total=self._files[path].size, digest=_digest(content)
                )
                start += len(content)
                self._received[path] = received.received
                self._sent += len(content)
                self._note(path)

    def _check_arrived(self, file: UploadedFile) -> None:
        if _differs(self._folder / file.path, [(piece.size, piece.sha256) for piece in file.pieces]):
            raise InvalidArgumentError(
                f"{self._folder / file.path} is not the file of which the server has the first {file.received} bytes; "
                "delete that model there, or choose another name"
            )

    def _note(self, path: str) -> None:
        done = sum(self._received.values())
        self._on_progress(TransferProgress(name=path, done=done, total=self._total, received=self._sent))


def _differs(file: Path, pieces: Sequence[tuple[int, str]]) -> bool:
    with file.open("rb") as stream:
        return any(hashlib.sha256(stream.read(size)).hexdigest() != digest for size, digest in pieces)


def _head_bytes(file: Path) -> int:
    """Return the length of a safetensors header, with the number before it, or of a file that is shorter."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(_LENGTH_BYTES)
    length = struct.unpack("<Q", start)[0] if len(start) == _LENGTH_BYTES else 0
    return min(size, _LENGTH_BYTES + length)


def _digest(content: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(content).digest()).decode()}:"


def _name_of(folder: Path) -> str:
    whole = folder.resolve()
    # In the Hub's cache, the folder is named after a commit.
    return whole.parent.parent.name.rpartition("--")[2] if whole.parent.name == "snapshots" else whole.name
