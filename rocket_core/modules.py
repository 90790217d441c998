"""The factored linear layer: how its tensors look on disk, in memory and at work.

On disk a layer `L` is `L.weight`, the stored coefficients as one row of numbers; `L.weight_mask`, one bit per
coefficient, absent where all are stored; `L.weight_u`, the transposed dictionary; and `L.bias` as it was. The stock
name with a one-dimensional shape is deliberate: a loader that does not know this format stops at the shape, where it
would give a layer of unknown names random numbers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from rocket_core.errors import CorruptCheckpointError, RocketError

QUANT_METHOD = "rocket"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFactors:
    """A factored layer: weight ≈ dictionary @ coefficients.

    Attributes:
        dictionary: D.
        coefficients: C, zero outside the support.
        support: which coefficients are stored, zeros among them included; None where all are.
    """

    dictionary: Float[Tensor, "d_in rank"]
    coefficients: Float[Tensor, "rank d_out"]
    support: Bool[Tensor, "rank d_out"] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedCoefficients:
    """Coefficients as they lie on disk.

    Attributes:
        values: the stored coefficients, output after output, atoms ascending within each.
        mask: bit `i % 8` (lowest first) of byte `i // 8` of row `j` says whether C[i, j] is stored; None where all are.
    """

    values: Float[Tensor, " nnz"]
    mask: UInt8[Tensor, "d_out bytes"] | None


def mask_shape(rank: int, d_out: int) -> tuple[int, int]:
    """Shape of the packed mask of a sparse layer."""
    return d_out, math.ceil(rank / 8)


def pack_coefficients(
    coefficients: Float[Tensor, "rank d_out"], support: Bool[Tensor, "rank d_out"] | None
) -> PackedCoefficients:
    """Packs coefficients into values and mask.

    Args:
        coefficients: C, zero outside the support.
        support: which coefficients to store; None stores all. One that is true everywhere is the same as None.

    Returns:
        Fresh tensors on the device of the coefficients; nnz is the support's count, not that of the values unequal to
        zero.
    """
    rows = coefficients.T
    if support is None or bool(support.all()):
        return PackedCoefficients(values=rows.reshape(-1).clone(), mask=None)
    stored = support.T.contiguous()
    values = rows[stored]
    assert torch.count_nonzero(values) == torch.count_nonzero(coefficients), "a coefficient lies outside the support"
    bits = np.packbits(stored.cpu().numpy(), axis=1, bitorder="little")
    return PackedCoefficients(values=values, mask=torch.from_numpy(bits).to(coefficients.device))


def unpack_coefficients(
    values: Float[Tensor, " nnz"],
    mask: UInt8[Tensor, "d_out bytes"] | None,
    rank: int,
    d_out: int,
    *,
    layer: str = "this layer",
) -> Float[Tensor, "rank d_out"]:
    """Inverse of `pack_coefficients`.

    Args:
        values: the stored coefficients.
        mask: where they belong; None if everywhere.
        rank: atoms, >= 1.
        d_out: output features, >= 1.
        layer: name for messages.

    Returns:
        C, a transposed view of row-major memory. Differentiable in the values.

    Raises:
        CorruptCheckpointError: shapes disagree, the mask counts another number of values than there are, or its padding
            is not empty.
    """
    _check_packed(values, mask, rank, d_out, layer)
    return _scatter_rows(values, mask, rank, d_out).T


def compose_weight(
    dictionary: Float[Tensor, "d_in rank"], coefficients: Float[Tensor, "rank d_out"], dtype: torch.dtype
) -> Float[Tensor, "d_out d_in"]:
    """Computes the dense weight (D C)ᵀ, in the orientation of `nn.Linear`.

    The product is computed in float32, in float64 if a factor is float64, and rounded once. For equal numbers the
    result is equal to the bit, on one device at one thread count, however the factors lie in memory: they are copied to
    fresh row-major memory first, as a matrix product may add in another order for another layout or alignment.

    Args:
        dictionary: D, rounded to the dtype it is stored in.
        coefficients: C, rounded to the dtype it is stored in.
        dtype: dtype of the result.
    """
    exact = torch.float64 if torch.float64 in (dictionary.dtype, coefficients.dtype) else torch.float32
    rows, atoms = (
        torch.empty(factor.T.shape, dtype=exact, device=factor.device).copy_(factor.T)
        for factor in (coefficients, dictionary)
    )
    return (rows @ atoms).to(dtype)


def layer_tensors(factors: LayerFactors, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of a factored layer on disk, without its bias, by what follows `L.` in their name.

    Args:
        factors: the layer.
        dtype: dtype to store; the mask is uint8 always.
    """
    packed = pack_coefficients(factors.coefficients.to(dtype), factors.support)
    tensors = {"weight": packed.values, "weight_u": factors.dictionary.T.to(dtype).contiguous()}
    if packed.mask is not None:
        tensors["weight_mask"] = packed.mask
    return tensors


class FactorizedLinear(nn.Linear):
    """A linear layer that computes `C.T @ (D.T @ x) + bias`.

    It is an `nn.Linear` so that peft and others treat it as one. Its state dict holds the tensors of the disk format,
    whichever of two states it is in:

    - packed, as constructed: `weight` holds the stored coefficients, expanded anew by every forward;
    - unpacked, after `unpack_`: the parameter `coefficients` holds Cᵀ with its zeros, and `weight` reads as the dense
      weight, computed at each reading and not to be written.

    Coefficients may be trained: those outside the support get no gradient and stay zero.

    Attributes:
        in_features: d_in.
        out_features: d_out.
        rank: atoms.
        nnz: stored coefficients.
        transposed: whether the stock layer in its place keeps its weight as [d_in, d_out] (`Conv1D` of GPT-2).
        layer_name: name for messages.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        nnz: int,
        bias: bool = False,
        transposed: bool = False,
        layer_name: str = "this layer",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear would allocate a dense weight
        self.in_features, self.out_features = in_features, out_features
        self.rank, self.nnz = rank, nnz
        self.transposed, self.layer_name = transposed, layer_name
        self._checked = False
        self.weight = nn.Parameter(torch.empty(nnz, device=device, dtype=dtype))
        self.register_parameter("weight_mask", None)
        if nnz < rank * out_features:
            # A parameter, not a buffer: accelerate offloads parameters to disk, buffers stay on the meta device.
            bits = torch.empty(mask_shape(rank, out_features), device=device, dtype=torch.uint8)
            self.weight_mask = nn.Parameter(bits, requires_grad=False)
        self.weight_u = nn.Parameter(torch.empty(rank, in_features, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))

    @property
    def packed(self) -> bool:
        """Whether the coefficients are in the form they have on disk."""
        return "coefficients" not in self._parameters

    @torch.no_grad()
    def unpack_(self) -> "FactorizedLinear":
        """Expands the coefficients for good: faster, for `rank · d_out - nnz` more numbers of memory.

        Raises:
            CorruptCheckpointError: values and mask do not belong together.
        """
        if self.packed:
            trainable, rows = self.weight.requires_grad, self._packed_rows()
            del self.weight
            self.coefficients = nn.Parameter(rows, requires_grad=trainable)
        return self

    @torch.no_grad()
    def dense_weight(self, dtype: torch.dtype | None = None) -> Float[Tensor, "d_out d_in"]:
        """The dense weight by `compose_weight`, in the layer's dtype if none is given."""
        return compose_weight(self.weight_u.T, self._rows().T, dtype or self.weight_u.dtype)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (callers of nn.Linear may name it)
        """Two products: with the dictionary, then with the coefficients."""
        return functional.linear(functional.linear(input, self.weight_u), self._rows(), self.bias)

    def extra_repr(self) -> str:
        """What `print(model)` shows of this layer."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}, nnz={self.nnz}, "
            f"bias={self.bias is not None}, packed={self.packed}"
        )

    def reset_parameters(self) -> None:
        """Does nothing: there is no sensible random start."""

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and "coefficients" in self.__dict__.get("_parameters", ()):
            return DenseView(self)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and "coefficients" in self.__dict__.get("_parameters", ()):
            raise _read_only(self.layer_name)
        super().__setattr__(name, value)

    def _rows(self) -> Float[Tensor, "d_out rank"]:
        if self.packed:
            return self._packed_rows()
        rows: Tensor = self.coefficients
        if self.weight_mask is not None and rows.requires_grad and torch.is_grad_enabled():
            rows = _KeepSupport.apply(rows, self.weight_mask)  # type: ignore[no-untyped-call]
        return rows

    def _packed_rows(self) -> Float[Tensor, "d_out rank"]:
        # Once: counting bits waits for the device, and cannot be compiled.
        if not self._checked and not torch.compiler.is_compiling():
            _check_packed(self.weight, self.weight_mask, self.rank, self.out_features, self.layer_name)
            self._checked = True
        return _scatter_rows(self.weight, self.weight_mask, self.rank, self.out_features)

    def _values(self, rows: Float[Tensor, "d_out rank"]) -> Float[Tensor, " nnz"]:
        if rows.is_meta:
            return torch.empty(self.nnz, dtype=rows.dtype, device="meta")
        return rows.reshape(-1) if self.weight_mask is None else rows[_unpack_bits(self.weight_mask, self.rank)]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.packed:
            rows = destination.pop(prefix + "coefficients")
            destination[prefix + "weight"] = self._values(rows.detach())
        for key in (prefix + name for name in ("weight", "weight_mask", "weight_u", "bias")):
            if key in destination:  # always in this order, on which the contents of shards depend
                destination[key] = destination.pop(key)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        self._checked = False
        if not self.packed:
            state_dict = dict(self._unpacked_state(state_dict, prefix))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _unpacked_state(self, state_dict: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """The state dict as the unpacked layer holds it, so that loading writes into the parameters that are there."""
        for key, tensor in state_dict.items():
            if key == prefix + "weight":
                mask = state_dict.get(prefix + "weight_mask", self.weight_mask)
                rows = unpack_coefficients(tensor, mask, self.rank, self.out_features, layer=self.layer_name).T
                yield prefix + "coefficients", rows
            elif key.startswith(prefix):
                yield key, tensor


class DenseView(Tensor):
    """What `FactorizedLinear.weight` reads as while unpacked: the dense weight's shape, dtype and device, no memory.

    peft, among others, asks every linear layer for `weight.device`. Computing with it composes the dense weight;
    writing into it, which would change a copy and be lost, raises.
    """

    _layer: FactorizedLinear

    def __new__(cls, layer: FactorizedLinear) -> "DenseView":
        """A tensor without storage."""
        atoms = layer.weight_u
        shape = (layer.out_features, layer.in_features)
        view: DenseView = Tensor._make_wrapper_subclass(cls, shape, dtype=atoms.dtype, device=atoms.device)
        return view

    def __init__(self, layer: FactorizedLinear) -> None:
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
        """The dense weight, computed."""
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
        return gradient * _unpack_bits(mask, gradient.shape[1]), None


def _read_only(layer: str) -> RocketError:
    return RocketError(
        f"{layer}: the weight of a factored layer is computed from its factors and cannot be written; "
        "call model.dequantize() first"
    )


def _unpack_bits(mask: UInt8[Tensor, "d_out bytes"], rank: int) -> Bool[Tensor, "d_out rank"]:
    if mask.device.type == "cpu" and not torch.compiler.is_compiling():
        bits = np.unpackbits(mask.detach().numpy(), axis=1, count=rank, bitorder="little")  # 15 times torch's speed
        return torch.from_numpy(bits).view(torch.bool)
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return ((mask.unsqueeze(-1) >> places) & 1).flatten(1)[:, :rank].bool()


def _scatter_rows(
    values: Float[Tensor, " nnz"], mask: UInt8[Tensor, "d_out bytes"] | None, rank: int, d_out: int
) -> Float[Tensor, "d_out rank"]:
    if mask is None:
        return values.view(d_out, rank)
    rows = torch.zeros(d_out, rank, dtype=values.dtype, device=values.device)
    return rows.masked_scatter_(_unpack_bits(mask, rank), values)


def _check_packed(values: Tensor, mask: Tensor | None, rank: int, d_out: int, layer: str) -> None:
    if mask is None:
        counted = rank * d_out
    else:
        if tuple(mask.shape) != mask_shape(rank, d_out):
            raise CorruptCheckpointError(
                f"{layer}: the mask is {list(mask.shape)}, not {list(mask_shape(rank, d_out))}; copy the files again"
            )
        if rank % 8 and bool((mask[:, -1] >> (rank % 8)).any()):
            raise CorruptCheckpointError(f"{layer}: the mask has bits beyond rank {rank}; copy the files again")
        counted = int(torch.count_nonzero(_unpack_bits(mask, rank)))
    if values.numel() != counted:
        raise CorruptCheckpointError(
            f"{layer}: {values.numel()} coefficients are stored where the layer has {counted}; copy the files again"
        )
