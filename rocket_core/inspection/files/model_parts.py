"""Files that make up a model in a folder: which of them are needed, and how large each may be. Loads no torch."""

import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

from rocket_core.errors import CheckpointFormatError, ModelNotFoundError, UnsafeFileError
from rocket_core.inspection.files.model_advice import advice_on_folder
from rocket_core.inspection.files.model_files import (
    ADAPTER_NAME,
    COMPANIONS,
    CONFIG_NAME,
    MAX_COMPANIONS,
    check_adapter,
    size_limit,
)
from rocket_core.inspection.files.safetensors_headers import INDEX_NAME, SUFFIX, local_weight_files

MAX_PARTS = MAX_COMPANIONS
"""Most files of one model."""

PARTS = (CONFIG_NAME, INDEX_NAME, f"*{SUFFIX}", *COMPANIONS)
"""Patterns of the files that make up a model."""
OTHERS = ("consolidated*",)
"""Exceptions: weights in the layout of another library, next to those that transformers reads."""
# One folder deep; no name that a shell, a URL or a log would have to escape, and none that is hidden.
_PATH = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,98}/)?[A-Za-z0-9_][A-Za-z0-9._-]{0,98}")


def is_weights(path: str) -> bool:
    """Return whether a file holds weights of the transformer, and not those of a module that follows it."""
    return path.endswith(SUFFIX) and "/" not in path


def check_part(path: str, size: int) -> None:
    """Raise an error unless a file can be a part of a model that is compressed.

    Args:
        path: its path in the model's folder, with `/`.
        size: its size in bytes.

    Raises:
        CheckpointFormatError: it is not a part of such a model.
        UnsafeFileError: its name is not valid, or it is larger than such a file can be.
    """
    if not _PATH.fullmatch(path) or ".." in path:
        raise UnsafeFileError(
            "the path of a file is not valid; name files as they are in the model's folder, at most one folder deep, "
            "with letters, digits, dots, dashes and underscores"
        )
    if not _is_part(path) and path != ADAPTER_NAME:
        raise CheckpointFormatError(
            f"{path} is not a part of a model that can be compressed; leave it out, and send config.json, safetensors "
            "and the tokenizer's files"
        )
    limit = None if is_weights(path) else size_limit(Path(path))
    if limit is not None and size > limit:
        raise UnsafeFileError(
            f"{path} is larger than {limit // 2**20} MiB, which such a file never is; leave it out, or replace it by "
            "the original"
        )


def check_parts(paths: Collection[str]) -> None:
    """Raise an error unless files with these paths may be a model.

    Raises:
        UnsafeFileError: there are too many.
        ModelNotFoundError: there is no config.json.
        CheckpointFormatError: there are no weights, or an adapter.
    """
    check_adapter(paths, "the model")
    if len(paths) > MAX_PARTS:
        raise UnsafeFileError(f"a model has at most {MAX_PARTS} files; leave out those that do not belong to it")
    if CONFIG_NAME not in paths:
        raise ModelNotFoundError(f"the model has no {CONFIG_NAME}; give a transformers checkpoint")
    if not any(map(is_weights, paths)):
        raise CheckpointFormatError(
            "the model has no safetensors; save it with save_pretrained(..., safe_serialization=True)"
        )


def list_parts(folder: Path) -> list[str]:
    """Return the files of a model in a folder that a compression needs, those that are small first.

    Args:
        folder: the model.

    Raises:
        ModelNotFoundError: the folder has no config.json.
        CheckpointFormatError: it has no safetensors, or an adapter.
        CorruptCheckpointError: the index is damaged, or a file that it names is missing.
        OSError: the folder cannot be read.
    """
    check_adapter([path.name for path in folder.iterdir()] if folder.is_dir() else [], str(folder))
    if not (folder / CONFIG_NAME).is_file():
        raise ModelNotFoundError(f"{folder} has no {CONFIG_NAME}; {advice_on_folder(folder)}")
    found = {path.relative_to(folder).as_posix() for path in (*folder.glob("*"), *folder.glob("*/*")) if path.is_file()}
    weights = {file.name for file in local_weight_files(folder, str(folder))}
    others = {path for path in found if _PATH.fullmatch(path) and _is_part(path) and not is_weights(path)}
    return [*sorted(others), *sorted(weights)]


def _is_part(path: str) -> bool:
    # `*` matches `/` as well.
    parts = (pattern for pattern in PARTS if ("/" in pattern) == ("/" in path))
    return any(fnmatchcase(path, part) for part in parts) and not any(fnmatchcase(path, other) for other in OTHERS)
