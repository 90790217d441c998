"""Python's search for garbage, put off while many objects are made of which none is garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection(*, lasting: bool = False) -> Iterator[None]:
    """Has this process not look for cycles of objects that nobody refers to.

    What is freed without that still is. The search takes time in proportion to all objects there are, again and again
    as they become more: half of the time that it takes to parse many files, a sixth of that to import torch and
    transformers.

    Args:
        lasting: whether what exists at the end stays as long as the process, so that no later search goes through it;
            for the imports of a program, not for a library.
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
