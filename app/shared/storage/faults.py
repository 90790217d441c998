"""Conversion of operating system errors to storage errors."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.shared.errors import DiskFullError, StorageError


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Convert operating system errors to errors that name the place they are about."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise DiskFullError(f"no room left in {path}; free some and retry") from error
        raise StorageError(f"cannot use {path}: {error.strerror or error}") from error
