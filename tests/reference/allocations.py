"""One allocation, where a test needs no more."""

from rocket_core.allocation import Allocator


def allocate(profiles, ratio, **settings):
    """Return the allocation at a ratio; the settings are those of `Allocator`."""
    return Allocator(profiles, **settings).allocate(ratio)
