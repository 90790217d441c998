"""Which modules compute what `nn.Linear` or `Conv1D` does, and can be replaced by stored layers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

_ROWS, _D_IN, _D_OUT = 3, 8, 4


def is_stock_linear(module: nn.Module) -> bool:
    """Return whether a module is an `nn.Linear` or a `Conv1D`, or a subclass of `nn.Linear` that computes the same.

    Subclasses can be anything: the linear layers of Falcon only write the product differently, while routers return
    several tensors and grouped layers read a part of their inputs. So a small weight is put in place of the module's,
    and its outputs are compared.
    """
    if type(module) is nn.Linear or type(module) is Conv1D:
        return True
    if not isinstance(module, nn.Linear) or set(module._parameters) != {"weight", "bias"}:
        return False
    if module._buffers or module._modules or module._forward_hooks or module._forward_pre_hooks:
        return False
    return _computes_product(type(module), biased=module.bias is not None)


def _computes_product(kind: type[nn.Linear], *, biased: bool) -> bool:
    sines = torch.arange(1, 1 + _ROWS * _D_IN + _D_OUT * _D_IN, dtype=torch.float64, device="cpu").sin()
    rows, weight = sines[: _ROWS * _D_IN].view(1, _ROWS, _D_IN), sines[_ROWS * _D_IN :].view(_D_OUT, _D_IN)
    bias = torch.arange(_D_OUT, dtype=torch.float64, device="cpu") if biased else None
    probe: Any = kind.__new__(kind)
    nn.Module.__init__(probe)
    probe.in_features, probe.out_features = _D_IN, _D_OUT
    probe.weight, probe.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)
    try:
        with torch.no_grad():
            outputs = probe(rows)
    except (TypeError, AttributeError, RuntimeError, ValueError, IndexError):
        return False
    expected = functional.linear(rows, weight, bias)
    return isinstance(outputs, Tensor) and outputs.shape == expected.shape and torch.allclose(outputs, expected)
