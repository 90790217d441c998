"""Stored layers whose weight is made of integer codes with a scale per group of inputs."""

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from rocket_core.errors import RocketError
from rocket_core.layers.code_tensors import (
    check_codes,
    code_shapes,
    empty_codes,
    pack_codes,
    unpack_codes,
    unpack_scales,
)
from rocket_core.layers.row_layout import RowLayout, multiply
from rocket_core.layers.stored_linear import LayerOptions, StoredLinear
from rocket_core.linalg.integer_codes import RoundedWeight
from rocket_core.sizes.code_format import CodeFormat

# Dtypes of layers that can compute from codes.
_TABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class QuantizedLinear(StoredLinear):
    """A linear layer that computes `W̃.T @ x + bias`, where W̃ is a rounded weight.

    Codes and scales are bytes and cannot be trained. There are three forms of the codes in memory, and one in state
    dicts:

    - packed, as on disk: every forward unpacks them;
    - unpacked: the dense weight is kept in addition, as a buffer that state dicts do not contain;
    - as a table, on a CPU: see `RowLayout`; the same bytes as packed unless entropy coded. The layer computes from
      codes and scales, adds up in float32, and rounds at the end. Inputs that require gradients are multiplied with
      the dense weight, decoded each time.

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
    dense: Tensor | None

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
        weight, scales = empty_codes((in_features, out_features), code_format, options.get("device"), coded_bytes)
        super().__init__(in_features, out_features, weight=weight, options=options)
        self.code_format, self.scale_exponent = code_format, scale_exponent
        self.coded_bytes = coded_bytes
        self.weight_scale = scales
        self.register_buffer("dense", None, persistent=False)
        # The form of the table, if the codes are in one.
        self._layout: RowLayout | None = None
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

    @property
    def preparing_bytes_on_cpu(self) -> int:
        """See `StoredLinear`."""
        if self.dtype not in _TABLE_DTYPES:
            return self.unpacking_bytes
        packed, _ = code_shapes(self._shape, self.code_format, self.coded_bytes).values()
        return self._table_layout.most_bytes - packed[0]

    @property
    def tabulated(self) -> bool:
        """Whether the codes are in a table, from which the layer computes."""
        return self._layout is not None

    def unpack_(self) -> "QuantizedLinear":
        """See `StoredLinear`."""
        if self.packed or self.tabulated:
            dense, codes = self._decode(self.dtype), self._packed_codes()
            self._replace_codes(codes)
            self.dense, self._layout = dense, None
        return self

    def prepare_(self) -> "QuantizedLinear":
        """Compute from a table of codes on a CPU, except in float64, and from the dense weight elsewhere."""
        return self.tabulate_() if self._can_tabulate(self.stored.device, self.dtype) else self.unpack_()

    @torch.no_grad()
    def tabulate_(self) -> "QuantizedLinear":
        """Arrange the codes in a table: takes about as much memory as packed codes, and decodes about as fast as dense.

        Raises:
            RocketError: the layer is not on a CPU, or computes in float64.
            CorruptCheckpointError: the stored tensors are inconsistent.
        """
        if not self._can_tabulate(self.stored.device, self.dtype):
            raise RocketError(
                f"{self.layer_name}: no kernel computes from codes in {self.dtype} on {self.stored.device}"
            )
        if not self.tabulated:
            layout = self._table_layout
            self._check_once()
            self._replace_codes(
                self._packed_codes() if self.coded_bytes is None else layout.fill(self._rounded().codes)
            )
            self.dense, self._layout = None, layout
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
        if self.tabulated and self._takes(input):
            return self._multiply(input)
        weight = self._decode(self.dtype) if self.dense is None else self.dense
        return functional.linear(input, weight, self.bias)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this layer."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bits={self.code_format.bits}, "
            f"group_size={self.code_format.group_size}, scale_bits={self.code_format.scale_bits}, "
            f"bias={self.bias is not None}, packed={self.packed}"
            f"{', tabulated=True' if self.tabulated else ''}"
            f"{'' if self.coded_bytes is None else f', coded_bytes={self.coded_bytes}'}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedLinear":
        before = self._dtype
        after = fn(torch.empty(0, dtype=before, device=self.stored.device))
        tabulates = self.tabulated and self._can_tabulate(after.device, after.dtype)
        if self.tabulated and not tabulates:
            self._replace_codes(self._packed_codes())
            self._layout = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._dtype = after.dtype
        cast = self.dense is None or self._dtype != before
        if cast and not self.packed and not self.offloaded and not self.tabulated:
            self.dense = self._decode(self._dtype)
        return self

    @property
    def _shape(self) -> tuple[int, int]:
        return self.in_features, self.out_features

    def _can_tabulate(self, device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cpu" and dtype in _TABLE_DTYPES

    def _takes(self, input: Tensor) -> bool:  # noqa: A002
        """Return whether the kernels give what the dense weight would; they have no gradients."""
        records = torch.is_grad_enabled() and input.requires_grad
        same = input.dtype == self.dtype and input.shape[-1:] == (self.in_features,)
        return same and input.device.type == "cpu" and not records and not torch.is_autocast_enabled("cpu")

    def _multiply(self, input: Tensor) -> Tensor:  # noqa: A002
        assert self._layout is not None
        rows = input.detach().reshape(-1, self.in_features)
        product = multiply(self._layout, rows, self.codes, self.weight_scale)
        if self.bias is not None:
            product = product + self.bias
        return product.to(self.dtype).view(*input.shape[:-1], self.out_features)

    def _replace_codes(self, codes: Tensor) -> None:
        """Replace the parameter with the codes by another form of them, and leave the packed state."""
        name = "weight" if self.packed else self._UNPACKED_NAME
        delattr(self, name)
        self.codes = codes if isinstance(codes, nn.Parameter) else nn.Parameter(codes, requires_grad=False)

    @property
    def _table_layout(self) -> RowLayout:
        """The form of codes that the layer computes with on a CPU."""
        coded = self.coded_bytes is not None
        return RowLayout.of(self._shape, self.code_format, self.scale_exponent, entropy_coded=coded)

    @property
    def disk_coded_bytes(self) -> int | None:
        """Bytes of the codes that a state dict has if they are entropy coded; None if they are packed.

        Not always `coded_bytes`: a table of codes is coded anew, perhaps by another version of the coder.
        """
        return self._packed_codes().numel() if self.tabulated and self.coded_bytes is not None else self.coded_bytes

    @torch.no_grad()
    def _rounded(self) -> RoundedWeight:
        if self._layout is not None:
            scales = unpack_scales(self.weight_scale, self._shape, self.code_format, self.scale_exponent)
            return RoundedWeight(
                codes=self._layout.codes(self.codes), scales=scales, entropy_coded=self.coded_bytes is not None
            )
        self._check_once()
        return self._read(self.stored, self.weight_scale)

    def _check_once(self) -> None:
        # As it waits for the device and cannot be compiled.
        if not self.tabulated and not self._checked and not torch.compiler.is_compiling():
            self._check(self.stored, self.weight_scale)
            self._checked = True

    @torch.no_grad()
    def _decode(self, dtype: torch.dtype) -> Float[Tensor, "d_out d_in"]:
        return self._rounded().rows(dtype)

    def _check(self, codes: Tensor, scales: Tensor) -> None:
        check_codes(codes, scales, self._shape, self.code_format, self.layer_name, self.coded_bytes)

    def _read(self, codes: Tensor, scales: Tensor) -> RoundedWeight:
        return unpack_codes(
            codes,
            scales,
            self._shape,
            self.code_format,
            self.scale_exponent,
            entropy_coded=self.coded_bytes is not None,
            layer=self.layer_name,
        )

    def _packed_codes(self) -> Tensor:
        """Return the codes as on disk."""
        return self._to_disk(self.codes) if self.tabulated else self.stored

    def _to_disk(self, unpacked: Tensor) -> Tensor:
        in_blocks = self._layout is not None and self.coded_bytes is not None
        return pack_codes(self._rounded())["weight"] if in_blocks else unpacked

    def _from_disk(self, weight: Tensor, state: Mapping[str, Any], prefix: str) -> Tensor:
        scales = state.get(prefix + "weight_scale", self.weight_scale)
        self._check(weight, scales)
        if self.coded_bytes is None:
            return weight
        # A damaged stream raises an error before parameters are overwritten.
        codes = self._read(weight, scales).codes
        if self._layout is None:
            return weight
        table = self._layout.fill(codes)
        if table.shape != self.codes.shape:  # of blocks
            self.codes.data = torch.empty_like(table)
        return table

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if not self.packed and not self.offloaded and not self.tabulated:
            self.dense = self._decode(self.dtype)
