"""What a stored layer is made of, its tensors on disk, and the dense weight composed from factors."""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rocket_core.errors import InvalidConfigError
from rocket_core.layers.code_tensors import pack_codes
from rocket_core.layers.packing import pack_coefficients
from rocket_core.linalg.block_codes import BlockWeight
from rocket_core.linalg.integer_codes import RoundedWeight


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFactors:
    """The factors of a stored layer: weight ≈ dictionary @ coefficients.

    Attributes:
        dictionary: D; None if the layer is sparse, which is the same as D = I.
        coefficients: C, zero outside the support. It has as many rows as D has atoms; d_in rows if sparse.
        support: mask of the stored coefficients, which may be zero; None if all are stored.
        dictionary_owner: module name of the layer with which the dictionary is stored; None if it is stored with this
            layer.
        value_codes: codes of the stored coefficients of each layer whose coefficients are concatenated here, as if they
            were the weight of one output; empty if they are numbers of the model's dtype.
        dictionary_codes: codes of the dictionary, as if it were the transposed weight of a layer with an input for each
            atom.

    Raises:
        InvalidConfigError: it has a dictionary owner but no dictionary.
    """

    dictionary: Float[Tensor, "d_in rank"] | None
    coefficients: Float[Tensor, "rows d_out"]
    support: Bool[Tensor, "rows d_out"] | None = None
    dictionary_owner: str | None = None
    value_codes: tuple[RoundedWeight, ...] = ()
    dictionary_codes: RoundedWeight | None = None

    def __post_init__(self) -> None:
        if self.dictionary is None and self.dictionary_owner is not None:
            raise InvalidConfigError(
                f"a layer that shares the dictionary of {self.dictionary_owner!r} has none; give that layer's"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """`(d_in, d_out)` of the layer."""
        rows, d_out = self.coefficients.shape
        return (rows if self.dictionary is None else self.dictionary.shape[0]), d_out

    @property
    def nnz(self) -> int:
        """Number of stored coefficients."""
        return self.coefficients.numel() if self.support is None else int(torch.count_nonzero(self.support))


StoredWeight: TypeAlias = LayerFactors | RoundedWeight
"""What replaces the weight of a layer."""


def compose_weight(
    dictionary: Float[Tensor, "d_in rank"] | None, coefficients: Float[Tensor, "rows d_out"], dtype: torch.dtype
) -> Float[Tensor, "d_out d_in"]:
    """Compute the dense weight (D C)ᵀ, in the orientation of `nn.Linear`.

    The product is computed in float32, or in float64 if a factor is float64, and rounded once. On one device with one
    thread count, the result is bitwise identical for equal numbers, regardless of the factors' memory layout: they are
    first copied to new row-major memory, as a matrix product may sum in a different order for another layout or
    alignment.

    Args:
        dictionary: D, rounded to the dtype it is stored in; None for the identity.
        coefficients: C, rounded to the dtype it is stored in.
        dtype: dtype of the result.

    Returns:
        The weight in new row-major memory.
    """
    if dictionary is None:
        return _row_major(coefficients, dtype)
    exact = torch.float64 if torch.float64 in (dictionary.dtype, coefficients.dtype) else torch.float32
    return (_row_major(coefficients, exact) @ _row_major(dictionary, exact)).to(dtype)


def approximation(stored: StoredWeight | BlockWeight, dtype: torch.dtype) -> Float[Tensor, "d_in d_out"]:
    """Return the weight that factors or codes represent, before they are rounded to the dtype they are stored in."""
    if isinstance(stored, RoundedWeight | BlockWeight):
        return stored.weight(dtype)
    dictionary, coefficients = stored.dictionary, stored.coefficients
    return (coefficients if dictionary is None else dictionary @ coefficients).to(dtype)


def layer_tensors(stored: StoredWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a stored layer on disk, without its bias, by the part of their name after `L.`.

    Args:
        stored: the layer.
        dtype: dtype to store factors in; the mask, codes and their scales are always uint8.

    Returns:
        `weight`; `weight_mask` unless all coefficients are stored and the layer is not sparse; `weight_u` where the
        dictionary is the layer's own; `weight_scale` if the layer is quantized, or its numbers are codes;
        `weight_u_scale` if the atoms are.
    """
    if isinstance(stored, RoundedWeight):
        return pack_codes(stored)
    packed = pack_coefficients(stored.coefficients.to(dtype), stored.support, always_masked=stored.dictionary is None)
    tensors = {"weight": packed.values}
    if stored.dictionary is not None and stored.dictionary_owner is None:
        tensors["weight_u"] = stored.dictionary.T.to(dtype).contiguous()
    if packed.mask is not None:
        tensors["weight_mask"] = packed.mask
    if stored.value_codes:
        [values] = stored.value_codes
        tensors |= pack_codes(values)
    if stored.dictionary_codes is not None and "weight_u" in tensors:
        atoms = pack_codes(stored.dictionary_codes)
        tensors |= {"weight_u": atoms["weight"], "weight_u_scale": atoms["weight_scale"]}
    return tensors


def _row_major(factor: Float[Tensor, "a b"], dtype: torch.dtype) -> Float[Tensor, "b a"]:
    """Return the transposed factor in new row-major memory."""
    return torch.empty(factor.T.shape, dtype=dtype, device=factor.device).copy_(factor.T)
