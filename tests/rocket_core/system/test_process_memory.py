"""Memory that the allocator keeps between the equal parts of a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PARTS = """
import psutil
from rocket_core.system.process_memory import keep_freed_memory, return_freed_memory, return_grown_memory

def part(megabytes):
    freed = bytearray(megabytes << 20)
    del freed
    return_grown_memory()
    print(psutil.Process().memory_info().rss >> 20)

keep_freed_memory()
return_freed_memory()
for megabytes in (300, 300, 400, 300, 300):
    part(megabytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems take freed memory back by themselves")
def test_freed_memory_is_kept_until_the_process_has_grown():
    done = subprocess.run(
        [sys.executable, "-c", PARTS],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )
    first, equal, grown, after, last = map(int, done.stdout.split())
    assert first >= 300
    assert equal == pytest.approx(first, abs=5)
    assert grown < first - 250
    assert after == pytest.approx(first, abs=5)
    assert last == pytest.approx(first, abs=5)
