"""Quantized layers whose scales can be trained."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from rocket_core.layers import QuantizedLinear, unpack_codes
from rocket_core.layers.code_tensors import pack_scales
from rocket_core.linalg.integer_codes import Scales

_HALF = 16


class ScaledLinear(nn.Module):
    """A linear layer with the weight `code · scale`, whose codes are fixed and whose scales are parameters.

    Args:
        layer: the quantized layer that it replaces, with scales in float16.

    Attributes:
        codes: integers by output, then input.
        scales: scales in float32 by output, then group.
        bias: the layer's own bias.
    """

    codes: Tensor

    def __init__(self, layer: QuantizedLinear) -> None:
        super().__init__()
        assert has_float_scales(layer), "scales on a logarithmic grid are codes"
        shape = (layer.in_features, layer.out_features)
        tensors = layer.state_dict()
        rounded = unpack_codes(
            tensors["weight"],
            tensors["weight_scale"],
            shape,
            layer.code_format,
            layer.scale_exponent,
            entropy_coded=layer.coded_bytes is not None,
            layer=layer.layer_name,
        )
        # In a tuple, as otherwise it would be registered as a submodule.
        self._layer = (layer,)
        self.register_buffer("codes", rounded.codes.T.contiguous(), persistent=False)
        self.scales = nn.Parameter(rounded.scales.values(torch.float32).T.contiguous())
        self.bias = layer.bias

    @property
    def weight(self) -> Float[Tensor, "d_out d_in"]:
        """The dense weight; differentiable in the scales."""
        size = self._layer[0].code_format.group_size
        return self.codes * self.scales.repeat_interleave(size, dim=1)[:, : self.codes.shape[1]]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (callers of nn.Linear may name it)
        """Multiply with the dense weight."""
        return functional.linear(input, self.weight, self.bias)

    @torch.no_grad()
    def round_scales(self) -> None:
        """Round the scales in place to what can be stored."""
        self.scales.copy_(self._nearest().values(torch.float32).T)

    @torch.no_grad()
    def restored(self) -> QuantizedLinear:
        """Return the quantized layer with these scales, rounded to what can be stored, and its own codes."""
        [layer] = self._layer
        layer.load_state_dict({"weight_scale": pack_scales(self._nearest())}, strict=False)
        layer.bias = self.bias
        return layer

    def _nearest(self) -> Scales:
        [layer] = self._layer
        return Scales.nearest(self.scales.T, layer.scale_exponent, layer.code_format)


def has_float_scales(layer: QuantizedLinear) -> bool:
    """Return whether the scales of a quantized layer are stored as float16, and not as codes."""
    return layer.code_format.scale_bits == _HALF
