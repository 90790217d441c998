"""Base class of stored layers, with packed or unpacked coefficients and a read-only weight."""

from collections.abc import Iterator
from typing import Any, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from rocket_core.errors import RocketError
from rocket_core.layers.packing import check_packed, mask_shape, scatter_rows, unpack_bits, unpack_coefficients


class LayerOptions(TypedDict, total=False):
    """The options of a stored layer that any linear layer has.

    Attributes:
        bias: whether it has a bias; False by default.
        transposed: whether the stock layer that it replaces stores its weight as [d_in, d_out] (`Conv1D` of GPT-2).
        layer_name: name for messages.
        device: device of the tensors.
        dtype: dtype of all tensors except the mask.
    """

    bias: bool
    transposed: bool
    layer_name: str
    device: torch.device | str | None
    dtype: torch.dtype | None


class StoredLinear(nn.Linear):
    """A linear layer made of stored coefficients; their meaning depends on the kind of layer.

    It is an `nn.Linear` so that peft and others treat it as one. Its state dict contains the tensors of the disk format
    in both of its states:

    - packed, as constructed: `weight` contains the stored coefficients, which every forward expands;
    - unpacked, after `unpack_`: the parameter `coefficients` contains Cᵀ with its zeros, and `weight` is a read-only
      view of the dense weight, computed on use.

    Coefficients may be trained: those outside the support get no gradient and stay zero.

    Args:
        in_features: d_in.
        out_features: d_out.
        width: coefficients per output, zeros included.
        nnz: stored coefficients.
        masked: whether there is a mask.
        options: see `LayerOptions`.

    Attributes:
        in_features: d_in.
        out_features: d_out.
        width: coefficients per output, zeros included.
        nnz: stored coefficients.
        transposed: whether the stock layer that it replaces stores its weight as [d_in, d_out].
        layer_name: name for messages.
    """

    def __init__(
        self, in_features: int, out_features: int, *, width: int, nnz: int, masked: bool, options: LayerOptions
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear would allocate a dense weight
        device, dtype = options.get("device"), options.get("dtype")
        self.in_features, self.out_features = in_features, out_features
        self.width, self.nnz = width, nnz
        self.transposed = options.get("transposed", False)
        self.layer_name = options.get("layer_name", "this layer")
        self._checked = False
        self.weight = nn.Parameter(torch.empty(nnz, device=device, dtype=dtype))
        self.register_parameter("weight_mask", None)
        if masked:
            # A parameter, not a buffer: accelerate offloads parameters to disk, but leaves buffers on the meta device.
            bits = torch.empty(mask_shape(width, out_features), device=device, dtype=torch.uint8)
            self.weight_mask = nn.Parameter(bits, requires_grad=False)
        self.register_parameter("bias", None)
        if options.get("bias", False):
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))

    @property
    def packed(self) -> bool:
        """Whether the coefficients are in the form stored on disk."""
        return "coefficients" not in self._parameters

    @property
    def stored(self) -> Tensor:
        """The parameter that contains the coefficients in the current state."""
        return self.weight if self.packed else self.coefficients

    @property
    def offloaded(self) -> bool:
        """Whether its tensors are offloaded until a forward loads them."""
        return self.stored.is_meta

    @torch.no_grad()
    def unpack_(self) -> "StoredLinear":
        """Expand the coefficients permanently: faster, at the cost of `width · d_out - nnz` more numbers in memory.

        Raises:
            CorruptCheckpointError: values and mask are inconsistent.
        """
        if self.packed:
            trainable, rows = self.weight.requires_grad, self._packed_rows()
            del self.weight
            self.coefficients = nn.Parameter(rows, requires_grad=trainable)
        return self

    def dense_weight(self, dtype: torch.dtype | None = None) -> Float[Tensor, "d_out d_in"]:
        """Return the dense weight computed by `compose_weight`, in the given dtype or in the layer's own.

        Raises:
            RocketError: a part of it is offloaded.
        """
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Do nothing, as stored coefficients have no useful random initialisation."""

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and "coefficients" in self.__dict__.get("_parameters", ()):
            return DenseView(self)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and "coefficients" in self.__dict__.get("_parameters", ()):
            raise _read_only(self.layer_name)
        super().__setattr__(name, value)

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

    def _values(self, rows: Float[Tensor, "d_out width"]) -> Float[Tensor, " nnz"]:
        if rows.is_meta:
            return torch.empty(self.nnz, dtype=rows.dtype, device="meta")
        return rows.reshape(-1) if self.weight_mask is None else rows[unpack_bits(self.weight_mask, self.width)]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.packed:
            rows = destination.pop(prefix + "coefficients")
            destination[prefix + "weight"] = self._values(rows.detach())
        for key in (prefix + name for name in ("weight", "weight_mask", "weight_u", "bias")):
            if key in destination:  # always in this order, as the contents of shards depend on it
                destination[key] = destination.pop(key)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        self._checked = False
        if not self.packed:
            state_dict = dict(self._unpacked_state(state_dict, prefix))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _unpacked_state(self, state_dict: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the state dict's entries in unpacked form, so that loading writes into the existing parameters."""
        for key, tensor in state_dict.items():
            if key == prefix + "weight":
                mask = state_dict.get(prefix + "weight_mask", self.weight_mask)
                rows = unpack_coefficients(tensor, mask, self.width, self.out_features, layer=self.layer_name).T
                yield prefix + "coefficients", rows
            elif key.startswith(prefix):
                yield key, tensor


class DenseView(Tensor):
    """The value of `StoredLinear.weight` while unpacked: shape, dtype and device of the dense weight, without memory.

    peft, among others, reads `weight.device` of every linear layer. Computing with the view composes the dense weight;
    writing to it, which would change a copy and be lost, raises an error.
    """

    _layer: StoredLinear

    def __new__(cls, layer: StoredLinear) -> "DenseView":
        """Create a tensor without storage."""
        stored = layer.stored
        shape = (layer.out_features, layer.in_features)
        view: DenseView = Tensor._make_wrapper_subclass(cls, shape, dtype=stored.dtype, device=stored.device)
        return view

    def __init__(self, layer: StoredLinear) -> None:
        super().__init__()
        self._layer = layer

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as if it were no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        values = [*args, *(kwargs.get(argument.name) for argument in arguments[len(args) :])]
        for argument, value in zip(arguments, values, strict=True):
            if isinstance(value, cls) and argument.alias_info is not None and argument.alias_info.is_write:
                raise _read_only(value._layer.layer_name)
        args, kwargs = tree_map(cls._composed, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def _composed(cls, value: Any) -> Any:
        return value._layer.dense_weight() if isinstance(value, cls) else value

    @property
    def data(self) -> Tensor:
        """The composed dense weight."""
        return self._layer.dense_weight()

    @data.setter
    def data(self, _value: Tensor) -> None:
        raise _read_only(self._layer.layer_name)


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


def _read_only(layer: str) -> RocketError:
    return RocketError(
        f"{layer}: the weight of a compressed layer is computed from what is stored and cannot be written; "
        "call model.dequantize() first"
    )
