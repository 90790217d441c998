"""A template that forks only when allowed: SIGUSR1 leaves its user no further process, SIGUSR2 lifts that limit."""

import os
import resource
import signal

# Imported now, as the user below may not be able to read it.
from tests.reference import forked_programs  # noqa: F401

_, _HARD = resource.getrlimit(resource.RLIMIT_NPROC)


def _allow(count):
    resource.setrlimit(resource.RLIMIT_NPROC, (count, _HARD))


if os.getuid() == 0:
    # The kernel limits no processes of root.
    os.setgid(65534)
    os.setuid(65534)
signal.signal(signal.SIGUSR1, lambda _number, _frame: _allow(0))
signal.signal(signal.SIGUSR2, lambda _number, _frame: _allow(_HARD))
