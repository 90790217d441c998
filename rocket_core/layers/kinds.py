"""Stored linear layers made of coefficients, by kind: factorized and sparse."""

from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from rocket_core.errors import RocketError
from rocket_core.layers.coefficient_linear import CoefficientLinear
from rocket_core.layers.factors import compose_weight
from rocket_core.layers.shared_product import SharedProduct
from rocket_core.layers.stored_linear import LayerOptions


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
