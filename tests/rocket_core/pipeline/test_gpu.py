"""The same run on an accelerator: `make test-gpu`."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import rocket_core.hf  # noqa: F401  registers the format
from rocket_core.pipeline import compress
from tests.reference.tiny_models import FAMILIES, VOCAB_SIZE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU that torch sees"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_accelerator_gives_the_same_result_as_the_cpu(family, tmp_path, model_folder, settings):
    reports, logits = {}, {}
    tokens = torch.randint(3, VOCAB_SIZE, (2, 20), generator=torch.Generator().manual_seed(1))
    for device in ("cpu", torch.accelerator.current_accelerator().type):
        output = tmp_path / device
        reports[device] = compress(str(model_folder(family)), output, settings(device=device, precision="float64"))
        model = AutoModelForCausalLM.from_pretrained(output / "rocket")
        with torch.no_grad():
            logits[device] = model(tokens).logits
    (cpu, gpu), (cpu_logits, gpu_logits) = reports.values(), logits.values()
    assert gpu.totals.kept_parameters <= gpu.allocation.budget
    assert gpu.allocation.total_error == pytest.approx(cpu.allocation.total_error, rel=1e-3)
    assert all(stage.peak_device_bytes for stage in gpu.stages if stage.name == "calibrating")
    torch.testing.assert_close(gpu_logits, cpu_logits, rtol=0.05, atol=0.05)
