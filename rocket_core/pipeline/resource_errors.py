"""Errors about exhausted resources."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rocket_core.errors import InsufficientDiskError, InsufficientMemoryError


@contextmanager
def resource_errors(output: Path) -> Iterator[None]:
    """Convert errors of torch and the system about exhausted resources into errors that name the resource."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise InsufficientMemoryError(
            f"memory ran out: {str(error).strip().splitlines()[0] if str(error) else 'no more to be had'}; finished "
            "layers are kept; resume with more memory free, or start again with fewer samples"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InsufficientDiskError(
            f"the disk of {output} is full; finished layers are kept: free some space and resume"
        ) from error
