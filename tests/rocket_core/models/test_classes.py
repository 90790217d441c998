import pytest
import torch
from torch import nn

from rocket_core.models.classes import without_weights

# 256 GiB, which no machine that runs this has to spare.
HUGE = 2**36


@pytest.mark.parametrize(
    "create",
    [
        lambda: torch.zeros(HUGE),
        lambda: torch.ones(2, HUGE // 2),
        lambda: torch.empty((4, 1, HUGE // 4)),
        lambda: torch.rand(size=(HUGE,)),
        lambda: torch.full((HUGE,), 2.0),
        lambda: torch.zeros(torch.Size([HUGE]), dtype=torch.bfloat16),
    ],
)
def test_large_parameters_take_no_memory_while_built(create):
    with without_weights():
        module = nn.Module()
        module.weight = nn.Parameter(create())
    assert module.weight.is_meta
    assert module.weight.numel() == HUGE


def test_buffers_are_real_and_parameters_are_not():
    with without_weights():
        layer = nn.BatchNorm1d(8)
    assert layer.weight.is_meta
    assert torch.equal(layer.running_var, torch.ones(8))
    assert not torch.zeros(HUGE // 2**30).is_meta
