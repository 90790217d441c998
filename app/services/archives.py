"""Archives of a job's files, as they are downloaded: of known size, and readable from any position."""

import hashlib
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from app.services.outputs import Download

_BLOCK = tarfile.BLOCKSIZE
# As tar writes it: two empty blocks, and then whole records.
_RECORD = tarfile.RECORDSIZE


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A run of bytes of an archive.

    Attributes:
        size: its bytes.
        read: returns those from one position up to another.
    """

    size: int
    read: Callable[[int, int], Iterator[bytes]]


class TarArchive:
    """A tar archive of stored files, put together while it is read.

    Args:
        files: the files, each under its own name.
        folder: folder that contains them in the archive.
    """

    def __init__(self, files: Sequence[Download], folder: str) -> None:
        self._parts: list[_Part] = []
        digest = hashlib.sha256(folder.encode())
        for file in files:
            artifact = file.artifact
            info = tarfile.TarInfo(f"{folder}/{artifact.name}")
            info.size, info.mtime = artifact.size, int(artifact.created_at.timestamp())
            header = info.tobuf(tarfile.PAX_FORMAT)
            digest.update(header + bytes.fromhex(artifact.sha256))
            self._parts += [
                _constant(header),
                _Part(size=artifact.size, read=file.read),
                _constant(bytes(-artifact.size % _BLOCK)),
            ]
        end = self.size + 2 * _BLOCK
        self._parts.append(_constant(bytes(2 * _BLOCK + -end % _RECORD)))
        self.sha256 = digest.hexdigest()

    @property
    def size(self) -> int:
        """Bytes of the archive."""
        return sum(part.size for part in self._parts)

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """Return the bytes from one position up to another, in pieces."""
        begin = 0
        for part in self._parts:
            first, last = max(start - begin, 0), min(stop - begin, part.size)
            if first < last:
                yield from part.read(first, last)
            begin += part.size


def _constant(content: bytes) -> _Part:
    def read(start: int, stop: int) -> Iterator[bytes]:
        yield content[start:stop]

    return _Part(size=len(content), read=read)
