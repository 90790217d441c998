"""Memory that the allocator keeps between the equal parts of a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems take freed memory back by themselves")

PARTS = """
import sys

import psutil
from rocket_core.system.process_memory import keep_freed_memory, return_freed_memory, return_grown_memory

keep_freed_memory()
return_freed_memory()
before = psutil.Process().memory_info().rss
for megabytes in map(int, sys.argv[1:]):
    freed = b"x" * (megabytes << 20)
    del freed
    return_grown_memory()
    print((psutil.Process().memory_info().rss - before) >> 20)
"""


def kept(*parts):
    """Return the megabytes that a process keeps after each of its parts, which free so many."""
    done = subprocess.run(
        [sys.executable, "-c", PARTS, *map(str, parts)],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )
    return list(map(int, done.stdout.split()))


def test_freed_memory_is_kept_until_the_process_has_grown():
    assert kept(300, 300, 400, 300, 300) == pytest.approx([0, 300, 0, 0, 300], abs=10)


def test_much_memory_is_not_kept():
    assert kept(700, 700, 700) == pytest.approx([0, 0, 0], abs=10)
