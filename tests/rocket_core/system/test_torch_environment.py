import os
import subprocess
import sys

import pytest

from rocket_core.system import torch_environment
from rocket_core.system.machine import usable_processors
from rocket_core.system.torch_environment import set_torch_defaults


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, 8),
        ("0::/\n", {"cpu.max": "300000 100000"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 8),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "250000", "cpu/a/cpu.cfs_period_us": "100000"}, 2),
        ("9:memory:/a\n", {"memory/a/cpu.max": "100000 100000"}, 8),
    ],
)
def test_usable_processors_respect_affinity_and_quota(tmp_path, monkeypatch, membership, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(8)))
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(membership)
    for name, content in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    assert usable_processors(tmp_path / "cgroup", tmp_path / "proc") == expected


@pytest.mark.parametrize("usable", [1, 4])
def test_threads_wait_passively_and_respect_a_limit(monkeypatch, usable):
    monkeypatch.setattr(torch_environment, "usable_processors", lambda: usable)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    environment = {}
    set_torch_defaults(environment)
    defaults = {"OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"}
    assert environment == defaults | ({"OMP_NUM_THREADS": "1"} if usable == 1 else {})


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_variables_set_by_the_user_are_kept(monkeypatch, name):
    monkeypatch.setattr(torch_environment, "usable_processors", lambda: 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    given = {"OMP_WAIT_POLICY": "ACTIVE", "THP_MEM_ALLOC_ENABLE": "0", name: "3"}
    environment = dict(given)
    set_torch_defaults(environment)
    assert environment == given


@pytest.mark.slow
def test_torch_takes_its_thread_count_from_the_environment():
    code = (
        "import os\n"
        "from rocket_core.system import torch_environment\n"
        "torch_environment.usable_processors, os.cpu_count = (lambda: 1), (lambda: 4)\n"
        "torch_environment.set_torch_defaults(os.environ)\n"
        "import torch; print(torch.get_num_threads())"
    )
    given = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))}
    result = subprocess.run([sys.executable, "-c", code], env=given, check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "1"
