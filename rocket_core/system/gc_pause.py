"""Pausing the cyclic garbage collector during bulk allocation."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection(*, lasting: bool = False) -> Iterator[None]:
    """Disable cyclic garbage collection in this process while the context is active.

    Reference counting still frees objects. A collection takes time proportional to the number of live objects and runs
    repeatedly as that number grows; that is half of the time of parsing many files, and a sixth of that of importing
    torch and transformers.

    Args:
        lasting: whether to exclude all objects that exist at the end from later collections, for the lifetime of the
            process; for the imports of a program, not for a library.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if lasting:
            gc.freeze()
        if enabled:
            gc.enable()
