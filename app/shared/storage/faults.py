"""What the system says of files, as errors of ours."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.shared.errors import DiskFullError, StorageError


@contextmanager
def storage_errors(place: Path) -> Iterator[None]:
    """Says of errors of the system which place they are about."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise DiskFullError(f"no room left in {place}; free some and retry") from error
        raise StorageError(f"cannot use {place}: {error.strerror or error}") from error
