"""Stored linear layers made of coefficients, some of which may be absent: factorized and sparse ones."""

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from rocket_core.errors import RocketError
from rocket_core.layers.factors import compose_weight
from rocket_core.layers.packing import check_packed, mask_shape, scatter_rows, unpack_bits, unpack_coefficients
from rocket_core.layers.shared_product import SharedProduct
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


class FactorizedLinear(CoefficientLinear):
    """A linear layer that computes `C.T @ (D.T @ x) + bias`.

    D belongs to this layer or to another layer, its dictionary owner. An owner and its followers that are called on the
    same input compute `D.T @ x` once, unless autograd records them: see `SharedProduct`.

    A follower only refers to the owner: neither its parameters nor its state dict contain the dictionary. Casting,
    moving, loading and training of the owner affect the follower. If the owner is offloaded, a follower calls the
    owner's forward, which loads the dictionary.

    Attributes:
        rank: number of atoms.
        followers: number of layers that use the dictionary of this one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        nnz: int,
        dictionary_owner: "FactorizedLinear | None" = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        masked = nnz < rank * out_features
        super().__init__(in_features, out_features, width=rank, nnz=nnz, masked=masked, options=options)
        self.followers = 0
        # In a tuple, as otherwise it would be registered as a submodule.
        self._dictionary_owner = None if dictionary_owner is None else (dictionary_owner,)
        if dictionary_owner is None:
            device, dtype = options.get("device"), options.get("dtype")
            self.weight_u = nn.Parameter(torch.empty(rank, in_features, device=device, dtype=dtype))
            self._shared = SharedProduct()
        else:
            assert dictionary_owner.dictionary_owner is dictionary_owner, "a follower owns no dictionary"
            fits = (dictionary_owner.rank, dictionary_owner.in_features) == (rank, in_features)
            assert fits, "the dictionary does not fit"
            dictionary_owner.followers += 1

    @property
    def rank(self) -> int:
        """Number of atoms of the dictionary."""
        return self.width

    @property
    def dictionary_owner(self) -> "FactorizedLinear":
        """The layer with the dictionary; this layer unless it is a follower."""
        return self if self._dictionary_owner is None else self._dictionary_owner[0]

    @torch.no_grad()
    def dense_weight(self, dtype: torch.dtype | None = None) -> Float[Tensor, "d_out d_in"]:
        """See `StoredLinear`."""
        if self.dictionary_owner.offloaded and not self.offloaded:
            raise RocketError(
                f"{self.layer_name}: the dictionary it shares is offloaded; load the model without offloading"
            )
        return compose_weight(self.dictionary_owner.atoms().T, self._rows().T, dtype or self.dtype)

    def atoms(self) -> Float[Tensor, "rank d_in"]:
        """Return Dᵀ, of a layer that owns its dictionary."""
        return self.weight_u

    def forward(self, input: Tensor, *, dictionary_only: bool = False) -> Tensor:  # noqa: A002 (callers may name it)
        """Multiply with the dictionary, then with the coefficients.

        Args:
            input: x.
            dictionary_only: return the first product, as followers request from the owner.
        """
        product = self._product(input)
        return product if dictionary_only else functional.linear(product, self._rows(), self.bias)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this layer."""
        followed = f", dictionary of {self.dictionary_owner.layer_name}" if self._dictionary_owner is not None else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}, nnz={self.nnz}, "
            f"bias={self.bias is not None}, packed={self.packed}{followed}"
        )

    def _product(self, input: Tensor) -> Tensor:  # noqa: A002
        owner = self.dictionary_owner
        dictionary, shared = owner.weight_u, owner._shared
        shares = owner.followers > 0 and shared.is_possible(input, dictionary)
        product = shared.take(input, dictionary) if shares else None
        if product is None and owner is self:
            product = functional.linear(input, self.atoms())
            if shares:
                shared.leave(input, dictionary, product, uses=self.followers)
        elif product is None:
            # Call its forward, which accelerate wraps to load the weights and offload them again.
            product = owner.forward(input, dictionary_only=True).to(input.device)
        return product


class SparseLinear(CoefficientLinear):
    """A linear layer that computes `C.T @ x + bias`: the coefficients are the weight, most of them zero."""

    def __init__(self, in_features: int, out_features: int, *, nnz: int, **options: Unpack[LayerOptions]) -> None:
        super().__init__(in_features, out_features, width=in_features, nnz=nnz, masked=True, options=options)

    @torch.no_grad()
    def dense_weight(self, dtype: torch.dtype | None = None) -> Float[Tensor, "d_out d_in"]:
        """See `StoredLinear`."""
        return compose_weight(None, self._rows().T, dtype or self.dtype)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (callers of nn.Linear may name it)
        """Multiply with the expanded coefficients."""
        return functional.linear(input, self._rows(), self.bias)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this layer."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, nnz={self.nnz}, "
            f"bias={self.bias is not None}, packed={self.packed}"
        )


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
