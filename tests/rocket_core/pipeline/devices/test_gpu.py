"""Runs whose blocks are shared among two processes on accelerators: two of them, or one for both."""

import pytest
import torch

from rocket_core.pipeline import compress
from tests.sampling import sweep

pytestmark = pytest.mark.gpu
FAST = {"preset": "fast", "ratio": None, "sensitivity_samples": 4, "export": ("rocket",)}
CODES = {"kinds": ("low_rank", "quantized"), "code_bits": (4, 8), "group_size": (8, 0)}


@pytest.mark.parametrize("target", sweep([{"ratio": 0.3}], soak=[{"target_bytes": 120_000} | CODES]))
def test_two_processes_write_the_bytes_of_one(
    target, accelerator, tmp_path, model_folder, settings, fingerprint, leave, fate
):
    model, first = str(model_folder("llama")), f"{accelerator.type}:0"
    second = f"{accelerator.type}:1" if torch.accelerator.device_count() > 1 else first
    if accelerator.type == "sim":
        fate("simulated")
    compress(model, tmp_path / "one", settings(**FAST | target, device=first))
    leave({1})

    report = compress(model, tmp_path / "two", settings(**FAST | target, device=f"{first},{second}"))

    assert fingerprint(tmp_path / "two") == fingerprint(tmp_path / "one")
    devices = {stage.name: stage.device for stage in report.stages}
    assert devices["calibrating"].startswith("2 x ") or "; " in devices["calibrating"]
    assert devices["factorizing"] == devices["calibrating"]
