"""Files of a model folder that a stranger may have written: which of them may be read, and how they are opened.

A folder is not trusted. A symbolic link in it could lead to any file that this process can read, and what is read can
end up in an artifact; a device or a FIFO never ends. So a link may lead only to a file of the same model, and only
regular files of a plausible size are opened. Loads no torch.
"""

import errno
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

from rocket_core.errors import CheckpointFormatError, UnsafeFileError

CONFIG_NAME = "config.json"
ADAPTER_NAME = "adapter_config.json"

COMPANIONS = (
    # The modules of sentence-transformers that follow the model, each in its own folder.
    "[0-9]*_*/config.json",
    "[0-9]*_*/model.safetensors",
    "added_tokens.json",
    "chat_template*",
    "config_sentence_transformers.json",
    "generation_config.json",
    "merges.txt",
    "modules.json",
    "preprocessor_config.json",
    "processor_config.json",
    "sentence_*_config.json",
    "special_tokens_map.json",
    "tokenizer*",
    "vocab.*",
    "*.model",
    "LICENSE*",
    "NOTICE*",
)
"""What a model needs besides its weights and config.json, and an artifact therefore gets a copy of."""

# Folders whose files are read: the modules of sentence-transformers, and further chat templates.
_READ_FOLDERS = ("[0-9]*_*", "additional_chat_templates")

# The largest vocabularies take 60 MB, a dense module of sentence-transformers some tens.
_MAX_LARGE_BYTES = 2**29
_LARGE = ("*/model.safetensors", "added_tokens.json", "merges.txt", "tokenizer*", "vocab.*", "*.model")
# Settings, templates and licences: a thousand times what is usual.
MAX_SMALL_BYTES = 2**24
# All copies together.
_MAX_COMPANIONS_BYTES = 2**31
_MAX_COMPANIONS = 1000

_CHUNK_BYTES = 2**20


def vet_folder(folder: Path, name: str) -> None:
    """Refuse a model folder with a file that must not be read. Nothing is opened.

    Args:
        folder: the model; what it resolves to is the limit for its links.
        name: names the folder in messages.

    Raises:
        UnsafeFileError: a symbolic link leads out of the folder (or, in the Hub's cache, out of the repository's
            blobs) or nowhere, or a file is a device, FIFO or socket.
        CheckpointFormatError: the folder holds an adapter.
    """
    root = folder.resolve()
    names = set()
    for entry in sorted(os.scandir(root), key=lambda found: found.name):
        names.add(entry.name)
        # Not `DirEntry.is_dir`, which raises where links form a circle.
        is_folder = Path(entry.path).is_dir()
        if is_folder and not any(fnmatchcase(entry.name, pattern) for pattern in _READ_FOLDERS):
            continue
        _require_safe(root, Path(entry.path), f"{name}/{_shown(entry.name)}")
        for inner in sorted(Path(entry.path).iterdir()) if is_folder else ():
            if not inner.is_dir():
                _require_safe(root, inner, f"{name}/{_shown(entry.name)}/{_shown(inner.name)}")
    refuse_adapter(names, name)


def refuse_adapter(names: Collection[str], name: str) -> None:
    """Refuse a model with an adapter, which transformers would add to the weights when it loads the model.

    Args:
        names: files of the model.
        name: names the model in messages.

    Raises:
        CheckpointFormatError: one of the files configures an adapter.
    """
    if ADAPTER_NAME in names:
        raise CheckpointFormatError(
            f"{name} holds an adapter ({ADAPTER_NAME}), which is not a part of the weights; merge it into them "
            "(merge_and_unload() of PEFT), or remove the adapter's files"
        )


def companions(folder: Path, name: str) -> list[Path]:
    """Return the files of a model that an artifact gets a copy of, sorted, relative to its folder.

    Args:
        folder: the model.
        name: names the folder in messages.

    Raises:
        UnsafeFileError: a file must not be read (see `vet_folder`), or is larger than such a file can be.
    """
    root = folder.resolve()
    found = sorted({file for pattern in COMPANIONS for file in root.glob(pattern) if file.is_file()})
    if len(found) > _MAX_COMPANIONS:
        raise UnsafeFileError(
            f"{name} holds {len(found)} tokenizer, licence and settings files, more than {_MAX_COMPANIONS}; remove "
            "those that do not belong to the model"
        )
    total = 0
    for file in found:
        shown = f"{name}/{_shown(str(file.relative_to(root)))}"
        _require_safe(root, file, shown)
        size = file.stat().st_size
        _require_size(size, _limit(file.relative_to(root)), shown)
        total += size
    if total > _MAX_COMPANIONS_BYTES:
        raise UnsafeFileError(
            f"the tokenizer, licence and settings files of {name} together are larger than "
            f"{_MAX_COMPANIONS_BYTES // 2**20} MiB; remove those that do not belong to the model"
        )
    return [file.relative_to(root) for file in found]


def copy_file(folder: Path, file: Path, target: Path) -> None:
    """Copy one of `companions`, after checking it again: the folder may have changed since.

    Args:
        folder: the model.
        file: the file, relative to the folder.
        target: where to.

    Raises:
        UnsafeFileError: the file must not be read, or is larger than such a file can be.
        OSError: it cannot be read, or the copy cannot be written.
    """
    limit = _limit(file)
    with open_file(folder, file) as stream, target.open("wb") as copy:
        left = limit
        while chunk := stream.read(min(_CHUNK_BYTES, left + 1)):
            left -= len(chunk)
            if left < 0:
                raise _too_large(f"{folder.name}/{_shown(str(file))}", limit)
            copy.write(chunk)


def read_start(folder: Path, file: str, size: int) -> bytes:
    """Read at most so many bytes of a file of a model folder, from its start.

    Args:
        folder: the model.
        file: its name, relative to the folder.
        size: how many.

    Raises:
        UnsafeFileError: the file must not be read.
        OSError: it cannot be read.
    """
    with open_file(folder, Path(file)) as stream:
        return stream.read(size)


def read_file(folder: Path, file: str, *, limit: int = MAX_SMALL_BYTES) -> bytes:
    """Read a small file of a model folder.

    Args:
        folder: the model.
        file: its name, relative to the folder.
        limit: largest size, in bytes.

    Raises:
        UnsafeFileError: the file must not be read, or is larger than the limit.
        OSError: it cannot be read.
    """
    content = read_start(folder, file, limit + 1)
    if len(content) > limit:
        raise _too_large(f"{folder.name}/{file}", limit)
    return content


@contextmanager
def open_file(folder: Path, file: Path) -> Iterator[BinaryIO]:
    """Open a file of a model folder that is not led elsewhere, even if the folder changes meanwhile.

    Args:
        folder: the model.
        file: the file, relative to the folder.

    Raises:
        UnsafeFileError: the file must not be read (see `vet_folder`).
        OSError: it cannot be opened.
    """
    name = f"{folder.name}/{_shown(str(file))}"
    root = folder.resolve()
    base, target = _target(root, root / file, name)
    with os.fdopen(_open_beneath(base, target.relative_to(base).parts, name), "rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise _special(name)
        yield stream


def _require_safe(root: Path, file: Path, name: str) -> None:
    _, target = _target(root, file, name)
    mode = target.lstat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise _special(name)


def _target(root: Path, file: Path, name: str) -> tuple[Path, Path]:
    """Return the trusted folder that a file lies in once its links are followed, and its path there."""
    try:
        target = Path(os.path.realpath(file, strict=True))
    except OSError as error:
        if file.is_symlink() or error.errno == errno.ELOOP:
            raise UnsafeFileError(
                f"{name} is a symbolic link that leads nowhere; copy the file that it stands for into the folder, or "
                "remove the link"
            ) from error
        raise
    for base in (root, *_blobs(root)):
        if target.is_relative_to(base):
            return base, target
    raise UnsafeFileError(
        f"{name} is a symbolic link that leads out of the model's folder; copy the file that it stands for into the "
        "folder, or remove the link"
    )


def _blobs(root: Path) -> tuple[Path, ...]:
    """Return where the Hub's cache keeps the files of a snapshot; not resolved, so that it cannot be a link itself."""
    repository = root.parent.parent
    in_cache = root.parent.name == "snapshots" and repository.name.startswith("models--")
    return (repository / "blobs",) if in_cache else ()


def _open_beneath(base: Path, parts: tuple[str, ...], name: str) -> int:
    """Open a file below a folder and follow no link on the way; a FIFO does not block."""
    descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for number, part in enumerate(parts, start=1):
            kind = os.O_DIRECTORY if number < len(parts) else os.O_NONBLOCK
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind
            inner = os.open(part, flags, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise UnsafeFileError(f"{name} changed while it was read; leave the model's folder alone") from error
        raise
    return descriptor


def _limit(file: Path) -> int:
    # Licences first: whatever else their names match, they are texts.
    if fnmatchcase(file.name, "LICENSE*") or fnmatchcase(file.name, "NOTICE*"):
        return MAX_SMALL_BYTES
    is_large = any(fnmatchcase(str(file), pattern) for pattern in _LARGE)
    return _MAX_LARGE_BYTES if is_large else MAX_SMALL_BYTES


def _require_size(size: int, limit: int, name: str) -> None:
    if size > limit:
        raise _too_large(name, limit)


def _too_large(name: str, limit: int) -> UnsafeFileError:
    return UnsafeFileError(
        f"{name} is larger than {limit // 2**20} MiB, which such a file never is; remove it, or replace it by the "
        "original"
    )


def _shown(name: str) -> str:
    """Return a stranger's file name, without what could forge a line of a log."""
    return "".join(character if character.isprintable() else "?" for character in name)


def _special(name: str) -> UnsafeFileError:
    return UnsafeFileError(f"{name} is a device, FIFO or socket and not a regular file; remove it")
