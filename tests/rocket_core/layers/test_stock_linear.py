import pytest
import torch
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.idefics.modeling_idefics import IdeficsDecoupledLinear
from transformers.models.llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.pytorch_utils import Conv1D

from rocket_core.layers import is_stock_linear


class Scaled(nn.Linear):
    def forward(self, input):  # noqa: A002
        return 2 * super().forward(input)


class Normalised(nn.Linear):
    def __init__(self, d_in, d_out):
        super().__init__(d_in, d_out)
        self.norm = nn.LayerNorm(d_out)

    def forward(self, input):  # noqa: A002
        return super().forward(input)


def hooked():
    layer = FalconLinear(4, 3)
    layer.register_forward_hook(lambda module, inputs, output: -output)
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_same_product_in_other_words_is_linear(bias, device):
    with torch.device(device):
        assert is_stock_linear(FalconLinear(6, 5, bias=bias))
        assert is_stock_linear(nn.Linear(6, 5, bias=bias))
        assert is_stock_linear(Conv1D(6, 5))


@pytest.mark.parametrize(
    "module",
    [
        Llama4Router(Llama4TextConfig(hidden_size=8, num_local_experts=4, num_experts_per_tok=1)),
        IdeficsDecoupledLinear(4, 3, out_additional_features=2),
        Scaled(4, 3),
        Normalised(4, 3),
        nn.Bilinear(2, 3, 4),
        hooked(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_computes_something_else_is_not(module):
    assert not is_stock_linear(module)
