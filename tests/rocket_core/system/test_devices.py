import pytest
import torch

from rocket_core.errors import InvalidConfigError
from rocket_core.system.devices import resolve_device, resolve_devices

CPU = torch.device("cpu")


def test_each_named_device_is_found():
    assert resolve_devices("cpu") == (CPU,)
    assert resolve_devices("cpu, cpu") == (CPU, CPU)


@pytest.mark.parametrize("name", ["cpu,", "cpu,cuda:99", "cpu,meta", "nothing,cpu", ""])
def test_devices_that_cannot_be_used_are_refused(name):
    with pytest.raises(InvalidConfigError, match="device"):
        resolve_devices(name)


def test_where_one_device_is_needed_several_are_refused():
    with pytest.raises(InvalidConfigError, match="cpu,cpu"):
        resolve_device("cpu,cpu")


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_a_kind_stands_for_all_accelerators_of_it(name, monkeypatch):
    # As if processors were accelerators: torch allows an index for them.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: CPU)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    assert resolve_devices(name) == tuple(torch.device("cpu", index) for index in range(3))
    assert resolve_devices("cpu:0") == (torch.device("cpu:0"),)
