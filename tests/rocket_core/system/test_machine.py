import psutil
import pytest
import torch

from rocket_core.system import devices, machine
from rocket_core.system.machine import free_container_memory, free_disk, free_machine_memory, machine_memory

MIB = 2**20


@pytest.fixture
def system(tmp_path):
    """Return the free container memory for control groups and /proc, given as files by path and content."""

    def system(membership, files):
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / "self" / "cgroup").write_text(membership)
        for name, content in files.items():
            file = tmp_path / "cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{content}\n")
        return free_container_memory(tmp_path / "cgroup", tmp_path / "proc")

    return system


def test_a_containers_limit_counts_less_unreclaimable_use(system):
    stat = f"anon {30 * MIB}\ninactive_file {10 * MIB}\nactive_file 5"
    files = {"memory.max": 100 * MIB, "memory.current": 40 * MIB, "memory.stat": stat}
    assert system("0::/\n", files) == 70 * MIB


def test_the_tightest_surrounding_group_decides(system):
    files = {
        "a/memory.max": 100 * MIB,
        "a/memory.current": 90 * MIB,
        "a/b/memory.max": 50 * MIB,
        "a/b/memory.current": 10 * MIB,
        "a/b/c/memory.max": "max",
        "a/b/c/memory.current": 1,
    }
    assert system("0::/a/b/c\n", files) == 10 * MIB


def test_a_container_with_the_hosts_path_finds_its_own_root(system):
    files = {"memory.max": 8 * MIB, "memory.current": 9 * MIB}
    assert system("0::/docker/0123\n", files) == 0


def test_control_groups_version_1_are_supported(system):
    files = {
        "memory/x/memory.limit_in_bytes": 20 * MIB,
        "memory/x/memory.usage_in_bytes": 15 * MIB,
        "memory/x/memory.stat": f"total_inactive_file {MIB}",
        "memory/memory.limit_in_bytes": 2**63 - 4096,
        "memory/memory.usage_in_bytes": MIB,
    }
    assert system("5:cpu,memory:/x\n4:pids:/\n", files) == 6 * MIB


@pytest.mark.parametrize("files", [{}, {"memory.max": "max", "memory.current": 5}, {"memory.max": "?"}])
def test_without_a_limit_the_result_is_none(system, files):
    assert system("0::/\n", files) is None


def test_the_machines_memory_is_that_of_its_container(system, tmp_path):
    files = {"a/memory.max": 100 * MIB, "a/b/memory.max": "max", "memory/a/memory.limit_in_bytes": 2**63 - 4096}
    system("0::/a/b\n", files)
    assert machine_memory(tmp_path / "cgroup", tmp_path / "proc") == 100 * MIB
    assert machine_memory(tmp_path / "none", tmp_path / "proc") == psutil.virtual_memory().total


def test_the_container_limit_bounds_free_memory(monkeypatch):
    monkeypatch.setattr(devices, "free_container_memory", lambda: 5)
    monkeypatch.setattr(machine, "free_container_memory", lambda: 5)
    assert devices.free_memory(torch.device("cpu")) == free_machine_memory() == 5


def test_free_disk_works_for_a_folder_not_yet_created(tmp_path):
    assert free_disk(tmp_path / "a" / "b") > 0
