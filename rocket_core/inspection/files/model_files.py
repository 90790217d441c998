"""Safe access to the files of an untrusted model folder: which of them may be read, and how they are opened.

A symbolic link in such a folder could point to any file that this process can read, and its content could end up in an
artifact; reading a device or a FIFO may never end. So a link may only point to a file of the same model, and only
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
"""Files that a model needs in addition to its weights and config.json, and that are copied into artifacts."""

# Folders whose files are read: the modules of sentence-transformers, and additional chat templates.
_READ_FOLDERS = ("[0-9]*_*", "additional_chat_templates")

# The largest vocabularies take 60 MB, a dense module of sentence-transformers some tens of MB.
_MAX_LARGE_BYTES = 2**29
_LARGE = ("*/model.safetensors", "added_tokens.json", "merges.txt", "tokenizer*", "vocab.*", "*.model")
# Settings, templates and licences: a thousand times the usual size.
MAX_SMALL_BYTES = 2**24
# Limit of all copies together.
_MAX_COMPANIONS_BYTES = 2**31
MAX_COMPANIONS = 1000
"""Most of these files that one model has."""

_CHUNK_BYTES = 2**20


def vet_folder(folder: Path, name: str) -> None:
    """Raise an error if a model folder contains a file that must not be read. No file is opened.

    Args:
        folder: the model; links must stay within the folder that it resolves to.
        name: name of the folder in messages.

    Raises:
        UnsafeFileError: a symbolic link leads out of the folder (or, in the Hub's cache, out of the repository's
            blobs) or nowhere, or a file is a device, FIFO or socket.
        CheckpointFormatError: the folder contains an adapter.
    """
    root = folder.resolve()
    names = set()
    for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
        names.add(entry.name)
        # Not `DirEntry.is_dir`, which raises if links form a cycle.
        is_folder = Path(entry.path).is_dir()
        if is_folder and not any(fnmatchcase(entry.name, pattern) for pattern in _READ_FOLDERS):
            continue
        _check_safe(root, Path(entry.path), f"{name}/{_shown(entry.name)}")
        for inner in sorted(Path(entry.path).iterdir()) if is_folder else ():
            if not inner.is_dir():
                _check_safe(root, inner, f"{name}/{_shown(entry.name)}/{_shown(inner.name)}")
    check_adapter(names, name)


def check_adapter(names: Collection[str], name: str) -> None:
    """Raise an error if a model has an adapter, which transformers would add to the weights when loading the model.

    Args:
        names: files of the model.
        name: name of the model in messages.

    Raises:
        CheckpointFormatError: one of the files configures an adapter.
    """
    if ADAPTER_NAME in names:
        raise CheckpointFormatError(
            f"{name} holds an adapter ({ADAPTER_NAME}), which is not a part of the weights; merge it into them "
            "(merge_and_unload() of PEFT), or remove the adapter's files"
        )


def companions(folder: Path, name: str) -> list[Path]:
    """Return the files of a model that are copied into artifacts, sorted, relative to its folder.

    Args:
        folder: the model.
        name: name of the folder in messages.

    Raises:
        UnsafeFileError: a file must not be read (see `vet_folder`), or is larger than such a file can be.
    """
    root = folder.resolve()
    files = sorted({file for pattern in COMPANIONS for file in root.glob(pattern) if file.is_file()})
    if len(files) > MAX_COMPANIONS:
        raise UnsafeFileError(
            f"{name} holds {len(files)} tokenizer, licence and settings files, more than {MAX_COMPANIONS}; remove "
            "those that do not belong to the model"
        )
    total = 0
    for file in files:
        shown = f"{name}/{_shown(str(file.relative_to(root)))}"
        _check_safe(root, file, shown)
        size = file.stat().st_size
        if size > (limit := size_limit(file.relative_to(root))):
            raise _too_large(shown, limit)
        total += size
    if total > _MAX_COMPANIONS_BYTES:
        raise UnsafeFileError(
            f"the tokenizer, licence and settings files of {name} together are larger than "
            f"{_MAX_COMPANIONS_BYTES // 2**20} MiB; remove those that do not belong to the model"
        )
    return [file.relative_to(root) for file in files]


def copy_file(folder: Path, file: Path, target: Path) -> None:
    """Copy one of `companions`, checking it again because the folder may have changed.

    Args:
        folder: the model.
        file: the file, relative to the folder.
        target: path of the copy.

    Raises:
        UnsafeFileError: the file must not be read, or is larger than such a file can be.
        OSError: the file cannot be read, or the copy cannot be written.
    """
    limit = size_limit(file)
    with open_file(folder, file) as stream, target.open("wb") as copy:
        left = limit
        while chunk := stream.read(min(_CHUNK_BYTES, left + 1)):
            left -= len(chunk)
            if left < 0:
                raise _too_large(f"{folder.name}/{_shown(str(file))}", limit)
            copy.write(chunk)


def read_start(folder: Path, file: str, size: int) -> bytes:
    """Read the start of a file of a model folder.

    Args:
        folder: the model.
        file: its name, relative to the folder.
        size: maximum number of bytes to read.

    Raises:
        UnsafeFileError: the file must not be read.
        OSError: the file cannot be read.
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
        OSError: the file cannot be read.
    """
    content = read_start(folder, file, limit + 1)
    if len(content) > limit:
        raise _too_large(f"{folder.name}/{file}", limit)
    return content


@contextmanager
def open_file(folder: Path, file: Path) -> Iterator[BinaryIO]:
    """Open a file of a model folder without following links out of it, even if the folder changes meanwhile.

    Args:
        folder: the model.
        file: the file, relative to the folder.

    Raises:
        UnsafeFileError: the file must not be read (see `vet_folder`).
        OSError: the file cannot be opened.
    """
    name = f"{folder.name}/{_shown(str(file))}"
    root = folder.resolve()
    base, target = _target(root, root / file, name)
    with os.fdopen(_open_beneath(base, target.relative_to(base).parts, name), "rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise _special(name)
        yield stream


def _check_safe(root: Path, file: Path, name: str) -> None:
    _, target = _target(root, file, name)
    mode = target.lstat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise _special(name)


def _target(root: Path, file: Path, name: str) -> tuple[Path, Path]:
    """Return the trusted folder that contains a file once its links are followed, and its path there."""
    try:
        target = Path(os.path.realpath(file, strict=True))
    except OSError as error:
        if file.is_symlink() or error.errno == errno.ELOOP:
            raise UnsafeFileError(
                f"{name} is a symbolic link that leads nowhere; copy the file that it points to into the folder, or "
                "remove the link"
            ) from error
        raise
    for base in (root, *_blobs(root)):
        if target.is_relative_to(base):
            return base, target
    raise UnsafeFileError(
        f"{name} is a symbolic link that leads out of the model's folder; copy the file that it points to into the "
        "folder, or remove the link"
    )


def _blobs(root: Path) -> tuple[Path, ...]:
    """Return the Hub cache's folder for the files of a snapshot; not resolved, so that it cannot be a link itself."""
    repository = root.parent.parent
    in_cache = root.parent.name == "snapshots" and repository.name.startswith("models--")
    return (repository / "blobs",) if in_cache else ()


def _open_beneath(base: Path, parts: tuple[str, ...], name: str) -> int:
    """Open a file below a folder without following any link on the way; a FIFO does not block."""
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


def size_limit(file: Path) -> int:
    """Return the largest plausible size of one of `COMPANIONS`, in bytes; of any other file, that of a small one."""
    # Licences first: whatever other patterns their names match, they are texts.
    if fnmatchcase(file.name, "LICENSE*") or fnmatchcase(file.name, "NOTICE*"):
        return MAX_SMALL_BYTES
    is_large = any(fnmatchcase(str(file), pattern) for pattern in _LARGE)
    return _MAX_LARGE_BYTES if is_large else MAX_SMALL_BYTES


def _too_large(name: str, limit: int) -> UnsafeFileError:
    return UnsafeFileError(
        f"{name} is larger than {limit // 2**20} MiB, which such a file never is; remove it, or replace it by the "
        "original"
    )


def _shown(name: str) -> str:
    """Return an untrusted file name without characters that could forge a line of a log."""
    return "".join(character if character.isprintable() else "?" for character in name)


def _special(name: str) -> UnsafeFileError:
    return UnsafeFileError(f"{name} is a device, FIFO or socket and not a regular file; remove it")
