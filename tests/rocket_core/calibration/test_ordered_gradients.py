"""Gradients through attention that are the same to the bit in every run."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from rocket_core.calibration.ordered_gradients import ordered_gradients


def attended(leaf):
    """Return the output of fused attention, with other operations on both sides."""
    query, key, value = leaf.mul(2).unbind(0)
    return scaled_dot_product_attention(query, key, value, is_causal=True).mul(3)


def leaf_of(*shape, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, *shape, generator=generator).to(device, dtype).requires_grad_()


@pytest.fixture
def modes(monkeypatch):
    """Modes that are set, in order."""
    found = []
    real = torch.use_deterministic_algorithms

    def noted(mode, **more):
        found.append(mode)
        real(mode, **more)

    monkeypatch.setattr(torch, "use_deterministic_algorithms", noted)
    return found


def test_the_mode_is_on_for_attention_alone(modes):
    leaf, within = leaf_of(1, 2, 64, 16), []
    leaf.register_hook(lambda _: within.append(torch.are_deterministic_algorithms_enabled()))
    with ordered_gradients():
        output = attended(leaf)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        output.register_hook(lambda _: within.append(torch.are_deterministic_algorithms_enabled()))
        output.sum().backward()

    assert modes == [True, False, False]
    assert within == [False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()
    expected = torch.autograd.grad(attended(leaf).sum(), leaf)[0]
    assert torch.equal(leaf.grad, expected)


def test_the_mode_is_off_after_attention_failed(modes):
    def fail(_gradients):
        raise MemoryError

    def run():
        query = leaf_of(1, 2, 64, 16)[0]
        with ordered_gradients():
            output = scaled_dot_product_attention(query, query, query)
            output.grad_fn.register_prehook(fail)
            output.sum().backward()

    with pytest.raises(MemoryError):
        run()
    assert modes == [True, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_mode_of_the_caller_stays():
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        with ordered_gradients():
            attended(leaf_of(1, 2, 64, 16)).sum().backward()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(mode=False)


@pytest.mark.gpu
def test_a_gpu_finds_the_same_gradients_every_time(accelerator):
    leaf = leaf_of(1, 4, 1024, 64, device=accelerator, dtype=torch.bfloat16)
    found = []
    for _ in range(8):
        leaf.grad = None
        with ordered_gradients():
            attended(leaf).float().square().sum().backward()
        found.append(leaf.grad)
    assert all(torch.equal(other, found[0]) for other in found)
