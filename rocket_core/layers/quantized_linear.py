"""Stored layers whose weight is made of integer codes with a scale per group of inputs."""

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from rocket_core.code_format import CodeFormat
from rocket_core.errors import RocketError
from rocket_core.layers.code_tensors import check_codes, code_shapes, unpack_codes
from rocket_core.layers.stored_linear import LayerOptions, StoredLinear
from rocket_core.linalg.integer_codes import RoundedWeight


class QuantizedLinear(StoredLinear):
    """A linear layer that computes `W̃.T @ x + bias`, where W̃ is a rounded weight.

    Codes and scales are bytes and cannot be trained. While packed, every forward unpacks them; unpacked, the dense
    weight is kept in addition, as a buffer that state dicts do not contain.

    Its dtype is that of the stock layer that it replaces. It changes when the layer is cast; then the dense weight is
    computed again from the codes, so that it is rounded only once.

    Args:
        in_features: d_in.
        out_features: d_out.
        code_format: bits of codes and scales, and the size of groups.
        scale_exponent: see `Scales.exponent`.
        coded_bytes: bytes of the codes on disk if they are entropy coded; None if they are packed.
        options: see `LayerOptions`; the default dtype is torch's.

    Attributes:
        code_format: bits of codes and scales, and the size of groups.
        scale_exponent: see `Scales.exponent`.
        coded_bytes: bytes of entropy-coded codes; None if they are packed.
    """

    _UNPACKED_NAME = "codes"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        code_format: CodeFormat,
        scale_exponent: int,
        coded_bytes: int | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        packed = {
            name: nn.Parameter(torch.empty(shape, device=options.get("device"), dtype=torch.uint8), requires_grad=False)
            for name, shape in code_shapes((in_features, out_features), code_format, coded_bytes).items()
        }
        super().__init__(in_features, out_features, weight=packed["weight"], options=options)
        self.code_format, self.scale_exponent = code_format, scale_exponent
        self.coded_bytes = coded_bytes
        self.weight_scale = packed["weight_scale"]
        self.register_buffer("dense", None, persistent=False)
        # No parameter has this dtype if there is no bias.
        self._dtype = options.get("dtype") or torch.get_default_dtype()

    @property
    def dtype(self) -> torch.dtype:
        """See `StoredLinear`."""
        return self._dtype

    @property
    def unpacking_bytes(self) -> int:
        """See `StoredLinear`."""
        return self.in_features * self.out_features * self.dtype.itemsize

    def unpack_(self) -> "QuantizedLinear":
        """See `StoredLinear`."""
        if self.packed:
            self.dense, codes = self._decode(self.dtype), self.weight
            del self.weight
            self.codes = codes
        return self

    def dense_weight(self, dtype: torch.dtype | None = None) -> Float[Tensor, "d_out d_in"]:
        """See `StoredLinear`."""
        if self.offloaded:
            raise RocketError(f"{self.layer_name}: its weight is offloaded; load the model without offloading")
        return self._decode(dtype or self.dtype)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (callers of nn.Linear may name it)
        """Multiply with the dense weight.

        Raises:
            RocketError: the input consists of integers, as from a model that casts it to the dtype of `weight`.
        """
        if not input.is_floating_point():
            raise RocketError(
                f"{self.layer_name}: the input is {input.dtype}, as the model casts it to the dtype of the packed "
                "codes; load the model without keep_packed and without offloading"
            )
        weight = self._decode(self.dtype) if self.dense is None else self.dense
        return functional.linear(input, weight, self.bias)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this layer."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bits={self.code_format.bits}, "
            f"group_size={self.code_format.group_size}, scale_bits={self.code_format.scale_bits}, "
            f"bias={self.bias is not None}, packed={self.packed}"
            + ("" if self.coded_bytes is None else f", coded_bytes={self.coded_bytes}")
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedLinear":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        before, self._dtype = self._dtype, fn(torch.empty(0, dtype=self._dtype)).dtype
        if self._dtype != before and not self.packed and not self.offloaded:
            self.dense = self._decode(self._dtype)
        return self

    @torch.no_grad()
    def _decode(self, dtype: torch.dtype) -> Float[Tensor, "d_out d_in"]:
        # Only once, as it waits for the device and cannot be compiled.
        if not self._checked and not torch.compiler.is_compiling():
            self._check(self.stored, self.weight_scale)
            self._checked = True
        return self._rounded(self.stored, self.weight_scale).rows(dtype)

    def _check(self, codes: Tensor, scales: Tensor) -> None:
        shape = (self.in_features, self.out_features)
        check_codes(codes, scales, shape, self.code_format, self.layer_name, self.coded_bytes)

    def _rounded(self, codes: Tensor, scales: Tensor) -> RoundedWeight:
        return unpack_codes(
            codes,
            scales,
            (self.in_features, self.out_features),
            self.code_format,
            self.scale_exponent,
            entropy_coded=self.coded_bytes is not None,
            layer=self.layer_name,
        )

    def _to_disk(self, unpacked: Tensor) -> Tensor:
        return unpacked

    def _from_disk(self, weight: Tensor, state: Mapping[str, Any], prefix: str) -> Tensor:
        scales = state.get(prefix + "weight_scale", self.weight_scale)
        self._check(weight, scales)
        if self.coded_bytes is not None:
            self._rounded(weight, scales)  # raises an error before parameters are overwritten
        return weight

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if not self.packed and not self.offloaded:
            self.dense = self._decode(self.dtype)
