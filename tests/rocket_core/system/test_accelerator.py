"""What an accelerator refuses and reports: on CUDA, and on the simulated device as on CUDA."""

import pytest
import torch

from rocket_core.system import devices
from rocket_core.system.devices import (
    bytes_on_host,
    device_name,
    free_memory,
    peak_memory,
    reset_peak_memory,
    resolve_device,
)

pytestmark = pytest.mark.gpu
MIB = 2**20

REFUSED = {
    "a product with a matrix of the CPU": lambda x: x @ torch.ones(3, 3),
    "a sum with a vector of the CPU": lambda x: x + torch.ones(3),
    "a product with a number of the CPU": lambda x: torch.dot(x[0], torch.ones(3)),
    "a result on the CPU": lambda x: torch.add(x, 1, out=torch.empty(3, 3)),
    "indices of the device for the CPU": lambda x: torch.ones(3)[torch.zeros(1, dtype=torch.int64, device=x.device)],
    "numpy": lambda x: x.numpy(),
    "pinned memory": lambda x: x.pin_memory(),
    "a generator of the CPU": lambda x: torch.randn(3, device=x.device, generator=torch.Generator()),
    "products of integers": lambda x: x.to(torch.int64) @ x.to(torch.int64),
    "a factorization in half precision": lambda x: torch.linalg.cholesky_ex(x.to(torch.bfloat16)),
    "eigenvalues in half precision": lambda x: torch.linalg.eigh(x.to(torch.float16)),
    "a histogram": lambda x: torch.histogram(x, 3),
}
ALLOWED = {
    "a number of the CPU": lambda x: x * torch.tensor(2.0),
    "indices of the CPU": lambda x: x[torch.tensor([0, 2])],
    "a mask of the CPU": lambda x: x[torch.tensor([True, False, True])],
    "a number for a mask": lambda x: x.masked_fill(x > 0, torch.tensor(1.0)),
    "a copy to the CPU": lambda x: torch.empty(3, 3).copy_(x),
    "a sum of integers": lambda x: x.to(torch.int64).sum(),
    "a result of another shape": lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
}


@pytest.fixture
def x(accelerator):
    return torch.eye(3, device=accelerator)


@pytest.mark.parametrize("case", REFUSED)
def test_an_accelerator_refuses(case, x):
    with pytest.raises((NotImplementedError, RuntimeError, TypeError)):
        REFUSED[case](x)


@pytest.mark.parametrize("case", ALLOWED)
def test_an_accelerator_computes_as_the_cpu(case, x):
    torch.testing.assert_close(ALLOWED[case](x).cpu(), ALLOWED[case](x.cpu()))


def test_gradients_are_those_of_the_cpu(accelerator):
    gradients = []
    for device in (torch.device("cpu"), accelerator):
        weight = torch.arange(6.0).view(2, 3).to(device).requires_grad_()
        torch.nn.functional.gelu(weight[:, 1:].T @ weight).square().sum().backward()
        gradients.append(weight.grad.cpu())
    torch.testing.assert_close(*gradients)


def test_parameters_take_other_tensors(x):
    parameter = torch.nn.Parameter(x[0])
    parameter.data = torch.ones(2, 5, device=x.device)
    assert parameter.sum().item() == 10
    assert parameter.shape == (2, 5)


def test_memory_is_reported(accelerator):
    device = torch.empty(1, device=accelerator).device
    reset_peak_memory(device)
    before, free = torch.accelerator.memory_allocated(device), free_memory(device)
    held = torch.zeros(4, MIB, dtype=torch.uint8, device=device)
    view = held[1:]
    assert torch.accelerator.memory_allocated(device) - before == 4 * MIB
    assert peak_memory(device) - before == 4 * MIB
    assert free_memory(device) <= free
    del held
    assert torch.accelerator.memory_allocated(device) - before == 4 * MIB
    del view
    assert torch.accelerator.memory_allocated(device) == before
    assert peak_memory(device) - before == 4 * MIB


def test_it_is_found_and_waited_for(accelerator):
    assert resolve_device("auto").type == resolve_device(accelerator.type).type == accelerator.type
    assert device_name(accelerator)
    torch.accelerator.synchronize()


def test_bytes_come_to_the_host_in_parts(accelerator, monkeypatch):
    monkeypatch.setattr(devices, "_COPIED_BYTES", 1000)
    data = torch.randint(0, 256, (2500,), dtype=torch.uint8, device=accelerator)
    parts = list(bytes_on_host(data))
    assert [len(part) for part in parts] == [1000, 1000, 500]
    assert b"".join(parts) == bytes(data.tolist())
    assert b"".join(bytes_on_host(data[:0])) == b""
