"""Stored layers whose weight is made of coefficients, some of which may be absent."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rocket_core.layers.packing import check_packed, mask_shape, scatter_rows, unpack_bits, unpack_coefficients
from rocket_core.layers.stored_linear import LayerOptions, StoredLinear


class CoefficientLinear(StoredLinear):
    """A linear layer made of stored coefficients; their meaning depends on the kind of layer.

    While packed, `weight` contains the stored coefficients; unpacked, the parameter `coefficients` contains Cᵀ with its
    zeros, and the dense weight is computed on use. Coefficients may be trained: those outside the support get no
    gradient and stay zero.

    Args:
        in_features: d_in.
        out_features: d_out.
        width: coefficients per output, zeros included.
        nnz: stored coefficients.
        masked: whether there is a mask.
        options: see `LayerOptions`.

    Attributes:
        width: coefficients per output, zeros included.
        nnz: stored coefficients.
    """

    _UNPACKED_NAME = "coefficients"

    def __init__(
        self, in_features: int, out_features: int, *, width: int, nnz: int, masked: bool, options: LayerOptions
    ) -> None:
        device = options.get("device")
        weight = nn.Parameter(torch.empty(nnz, device=device, dtype=options.get("dtype")))
        super().__init__(in_features, out_features, weight=weight, options=options)
        self.width, self.nnz = width, nnz
        self.register_parameter("weight_mask", None)
        if masked:
            # A parameter, not a buffer: accelerate offloads parameters to disk, but leaves buffers on the meta device.
            bits = torch.empty(mask_shape(width, out_features), device=device, dtype=torch.uint8)
            self.weight_mask = nn.Parameter(bits, requires_grad=False)

    @property
    def unpacking_bytes(self) -> int:
        """See `StoredLinear`."""
        return (self.width * self.out_features - self.nnz) * self.dtype.itemsize

    @torch.no_grad()
    def unpack_(self) -> "CoefficientLinear":
        """See `StoredLinear`."""
        if self.packed:
            trainable, rows = self.weight.requires_grad, self._packed_rows()
            del self.weight
            self.coefficients = nn.Parameter(rows, requires_grad=trainable)
        return self

    def _rows(self) -> Float[Tensor, "d_out width"]:
        if self.packed:
            return self._packed_rows()
        rows: Tensor = self.coefficients
        if self.weight_mask is not None and rows.requires_grad and torch.is_grad_enabled():
            rows = _KeepSupport.apply(rows, self.weight_mask)  # type: ignore[no-untyped-call]
        return rows

    def _packed_rows(self) -> Float[Tensor, "d_out width"]:
        # Only once, as counting bits waits for the device and cannot be compiled.
        if not self._checked and not torch.compiler.is_compiling():
            check_packed(self.weight, self.weight_mask, self.width, self.out_features, self.layer_name)
            self._checked = True
        return scatter_rows(self.weight, self.weight_mask, self.width, self.out_features)

    def _to_disk(self, unpacked: Tensor) -> Tensor:
        if unpacked.is_meta:
            return torch.empty(self.nnz, dtype=unpacked.dtype, device="meta")
        mask = self.weight_mask
        return unpacked.reshape(-1) if mask is None else unpacked[unpack_bits(mask, self.width)]

    def _from_disk(self, weight: Tensor, state: Mapping[str, Any], prefix: str) -> Tensor:
        mask = state.get(prefix + "weight_mask", self.weight_mask)
        return unpack_coefficients(weight, mask, self.width, self.out_features, layer=self.layer_name).T


class _KeepSupport(torch.autograd.Function):
    """The identity; its gradient is zero outside the support."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return gradient * unpack_bits(mask, gradient.shape[1]), None
