"""Errors about written results."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rocket_core.errors import CompressionCancelledError, FaultyResultError, ResourceError
from rocket_core.system.files import DifferentContentError


@contextmanager
def naming_faults(kind: str, discard: Callable[[], object]) -> Iterator[None]:
    """Convert all that goes wrong while a written result is checked into an error that says so.

    Cancellation and exhausted resources pass unchanged.

    Args:
        kind: kind of the result.
        discard: called if it is faulty, so that it is written again.

    Raises:
        FaultyResultError: the result is faulty.
    """
    try:
        yield
    except (CompressionCancelledError, ResourceError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        discard()
        is_named = isinstance(error, FaultyResultError | DifferentContentError)
        raise FaultyResultError(
            f"the written result ({kind}) is faulty: {'' if is_named else 'it cannot be run: '}{error}; neither the "
            "model nor the settings are at fault, and finished layers are kept: resume the run, which writes the "
            "result again, and if that fails again, check the disk and report it"
        ) from error
