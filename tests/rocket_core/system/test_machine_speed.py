import pytest

from rocket_core.system import machine_speed
from rocket_core.system.machine_speed import bfloat16_gain, has_accelerator, measure_speed


def test_a_measured_speed_is_plausible_and_measured_once(monkeypatch):
    monkeypatch.setattr(machine_speed, "_LEAST_SECONDS", 0.01)
    measure_speed.cache_clear()
    speed = measure_speed()
    assert 1e8 < speed.products <= speed.rough_products < 1e15
    assert 1e7 < speed.memory < 1e13
    assert measure_speed() is speed


def test_gpus_are_recognized_by_their_devices(tmp_path):
    assert not has_accelerator(tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert has_accelerator(tmp_path)


@pytest.mark.parametrize(("flags", "gain"), [("avx2 amx_bf16", 4), ("avx512f avx512_bf16", 4), ("avx512f", 1)])
def test_instructions_for_bfloat16_count_as_faster(tmp_path, flags, gain):
    (tmp_path / "cpuinfo").write_text(f"flags : fpu {flags}\n")
    assert bfloat16_gain(tmp_path) == gain


def test_a_system_without_cpuinfo_counts_as_slow(tmp_path):
    assert bfloat16_gain(tmp_path) == 1
