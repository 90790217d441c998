"""All tests for GPUs, on the simulated device.

In a separate process: torch has one accelerator, found by `auto` and by libraries from then on, and registering it
cannot be undone, so that it would leak into the other tests of this process.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sampling import sweep

ROOT = Path(__file__).parents[3]
PLUGIN = "tests.reference.simulated_device_plugin"


@pytest.mark.parametrize(("chosen", "least"), sweep([("gpu and not soak", 80)], soak=[("gpu and soak", 5)]))
def test_the_tests_for_gpus_pass_on_a_simulated_device(chosen, least, tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-m", chosen, "-p", PLUGIN, "-p", "no:cacheprovider"]
    # Collecting all others would take as long as running these.
    files = [str(file) for file in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text("utf-8")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}

    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'run'}", *files],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )

    summary = done.stdout.rstrip().rpartition("\n")[2]
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in summary, summary
    assert int(re.match(r"\d+", summary)[0]) >= least, summary
