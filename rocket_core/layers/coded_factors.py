"""Stored layers made of coefficients whose numbers are integer codes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.layers.code_tensors import check_codes, empty_codes, unpack_codes
from rocket_core.layers.coefficient_linear import CoefficientLinear, FactorizedLinear, SparseLinear
from rocket_core.layers.packing import check_packed, scatter_rows
from rocket_core.layers.stored_linear import LayerOptions
from rocket_core.sizes.code_format import CodeFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueCodes:
    """How the numbers of a layer are stored.

    Attributes:
        format: bits of codes and scales, and the size of groups.
        exponent: see `Scales.exponent`; of the coefficients.
        dictionary_exponent: of the atoms; None unless the layer stores atoms.
    """

    format: CodeFormat
    exponent: int
    dictionary_exponent: int | None = None


class CodedLinear(CoefficientLinear):
    """A layer of coefficients, and perhaps atoms, that are integer codes; they cannot be trained.

    Packed, every forward decodes them; unpacked, they are kept decoded as well, in buffers that state dicts do not
    contain. Its dtype is that of the stock layer that it replaces.

    Attributes:
        codes_of: how the numbers are stored.
    """

    _UNPACKED_NAME = "codes"
    decoded_rows: Tensor | None
    decoded_atoms: Tensor | None

    def _store_codes(self, codes_of: ValueCodes, options: LayerOptions) -> None:
        """Replace the parameters of the base class with codes."""
        self.codes_of = codes_of
        device = options.get("device")
        self.weight, self.weight_scale = empty_codes((self.nnz, 1), codes_of.format, device)
        if codes_of.dictionary_exponent is not None:
            shape = self.width, self.in_features
            self.weight_u, self.weight_u_scale = empty_codes(shape, codes_of.format, device)
        self.register_buffer("decoded_rows", None, persistent=False)
        self.register_buffer("decoded_atoms", None, persistent=False)
        # No parameter has this dtype if there is no bias.
        self._dtype = options.get("dtype") or torch.get_default_dtype()

    @property
    def dtype(self) -> torch.dtype:
        """See `StoredLinear`."""
        return self._dtype

    @property
    def unpacking_bytes(self) -> int:
        """See `StoredLinear`."""
        atoms = 0 if self.codes_of.dictionary_exponent is None else self.width * self.in_features
        return (self.width * self.out_features + atoms) * self.dtype.itemsize

    @torch.no_grad()
    def unpack_(self) -> "CodedLinear":
        """See `StoredLinear`."""
        if self.packed:
            self._decode()
            codes = self.weight
            del self.weight
            self.codes = codes
        return self

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this layer."""
        return f"{super().extra_repr()}, bits={self.codes_of.format.bits}"

    @torch.no_grad()
    def _decode(self) -> None:
        self.decoded_rows = self._packed_rows()
        self.decoded_atoms = None if self.codes_of.dictionary_exponent is None else self._packed_atoms()

    def _rows(self) -> Float[Tensor, "d_out width"]:
        return self._packed_rows() if self.decoded_rows is None else self.decoded_rows

    @torch.no_grad()
    def _packed_rows(self) -> Float[Tensor, "d_out width"]:
        if not self._checked and not torch.compiler.is_compiling():
            self._check(self.stored, self.weight_scale)
        values = self._values(self.stored, self.weight_scale)
        if not self._checked and not torch.compiler.is_compiling():
            check_packed(values, self.weight_mask, self.width, self.out_features, self.layer_name)
            self._checked = True
        return scatter_rows(values, self.weight_mask, self.width, self.out_features)

    @torch.no_grad()
    def _packed_atoms(self) -> Float[Tensor, "rank d_in"]:
        exponent, shape = self.codes_of.dictionary_exponent, (self.width, self.in_features)
        assert exponent is not None
        if not torch.compiler.is_compiling():
            check_codes(self.weight_u, self.weight_u_scale, shape, self.codes_of.format, f"{self.layer_name}, atoms")
        rounded = unpack_codes(self.weight_u, self.weight_u_scale, shape, self.codes_of.format, exponent)
        return rounded.rows(self.dtype).T.contiguous()

    def _check(self, codes: Tensor, scales: Tensor) -> None:
        check_codes(codes, scales, (self.nnz, 1), self.codes_of.format, self.layer_name)

    def _values(self, codes: Tensor, scales: Tensor) -> Float[Tensor, " nnz"]:
        shape = (self.nnz, 1)
        return unpack_codes(codes, scales, shape, self.codes_of.format, self.codes_of.exponent).rows(self.dtype)[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CodedLinear":
        before = self._dtype
        self._dtype = fn(torch.empty(0, dtype=before, device=self.stored.device)).dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not self.packed and not self.offloaded and (self.decoded_rows is None or self._dtype != before):
            self._decode()
        return self

    def _to_disk(self, unpacked: Tensor) -> Tensor:
        return unpacked

    def _from_disk(self, weight: Tensor, state: Mapping[str, Any], prefix: str) -> Tensor:
        self._check(weight, state.get(prefix + "weight_scale", self.weight_scale))
        return weight

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if not self.packed and not self.offloaded:
            self._decode()


class CodedFactorizedLinear(CodedLinear, FactorizedLinear):
    """A `FactorizedLinear` of codes; a follower shares the dictionary of another layer of codes."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        nnz: int,
        codes_of: ValueCodes,
        dictionary_owner: FactorizedLinear | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(in_features, out_features, rank=rank, nnz=nnz, dictionary_owner=dictionary_owner, **options)
        assert (codes_of.dictionary_exponent is None) == (dictionary_owner is not None), "atoms belong to the owner"
        self._store_codes(codes_of, options)

    def atoms(self) -> Float[Tensor, "rank d_in"]:
        """See `FactorizedLinear`."""
        return self._packed_atoms() if self.decoded_atoms is None else self.decoded_atoms


class CodedSparseLinear(CodedLinear, SparseLinear):
    """A `SparseLinear` of codes."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        nnz: int,
        codes_of: ValueCodes,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(in_features, out_features, nnz=nnz, **options)
        self._store_codes(codes_of, options)
