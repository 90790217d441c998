"""Stored layers: their tensors on disk, in memory and in the forward pass.

A layer `L` that is not dense is stored as coefficients or as integer codes, and is one of four kinds. A token
embedding can be quantized, as if it were a linear layer with an output for every token.

- factored: weight ≈ dictionary @ coefficients. Tensors `L.weight`, `L.weight_mask`, `L.weight_u`; in `config.json` it
  has a `rank` and an `nnz`.
- follower: factored with the dictionary of another layer, the dictionary owner. No `L.weight_u`; in `config.json`
  its `dictionary` names the owner.
- sparse: the coefficients are the weight itself, as if the dictionary were the identity. No `L.weight_u`; in
  `config.json` it has only an `nnz`.
- factored, follower and sparse layers of codes: the same, but the coefficients and atoms are rounded, and `L.weight`
  and `L.weight_u` contain their codes, with scales in `L.weight_scale` and `L.weight_u_scale`; in `config.json` they
  have the keys of quantized layers as well, and with an own dictionary a `dictionary_exponent`.
- quantized: weight ≈ code · scale, where inputs share scales by groups. Tensors `L.weight` and `L.weight_scale`; in
  `config.json` it has `bits`, `group_size`, `scale_bits` and `scale_exponent`; and `coded_bytes` if its codes are
  entropy coded.

`L.weight` contains the stored coefficients as a one-dimensional tensor; `L.weight_mask` has one bit per coefficient and
is absent if all are stored, except that a sparse layer always has it; `L.weight_u` is the transposed dictionary;
`L.bias` is unchanged. In a quantized layer `L.weight` and `L.weight_scale` are one-dimensional tensors of bytes: see
`pack_codes`. The stock name with a one-dimensional shape is deliberate: a loader that does not know this format fails
on the shape, whereas it would initialise a layer with unknown tensor names randomly.
"""

from rocket_core.candidates import CODED_FACTOR_NAMES
from rocket_core.layers.code_tensors import check_codes, entry_codes, unpack_codes
from rocket_core.layers.coded_factors import CodedFactorizedLinear, CodedLinear, CodedSparseLinear, ValueCodes
from rocket_core.layers.coefficient_linear import FactorizedLinear, SparseLinear
from rocket_core.layers.factors import (
    LayerFactors,
    StoredWeight,
    approximation,
    compose_weight,
    layer_tensors,
)
from rocket_core.layers.layer_table import (
    FORMAT_VERSION,
    QUANT_METHOD,
    LayerEntry,
    format_version,
    quantization_config,
    read_entries,
)
from rocket_core.layers.packing import mask_shape, pack_coefficients, unpack_coefficients
from rocket_core.layers.quantized_embedding import QuantizedEmbedding, TiedEmbedding, TiedLinear
from rocket_core.layers.quantized_linear import QuantizedLinear
from rocket_core.layers.stock_linear import is_stock_linear
from rocket_core.layers.stored_linear import StoredLinear
from rocket_core.layers.value_codes import coded_entry, round_values

__all__ = [
    "CODED_FACTOR_NAMES",
    "FORMAT_VERSION",
    "QUANT_METHOD",
    "CodedFactorizedLinear",
    "CodedLinear",
    "CodedSparseLinear",
    "FactorizedLinear",
    "LayerEntry",
    "LayerFactors",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "SparseLinear",
    "StoredLinear",
    "StoredWeight",
    "TiedEmbedding",
    "TiedLinear",
    "ValueCodes",
    "approximation",
    "check_codes",
    "coded_entry",
    "compose_weight",
    "entry_codes",
    "format_version",
    "is_stock_linear",
    "layer_tensors",
    "mask_shape",
    "pack_coefficients",
    "quantization_config",
    "read_entries",
    "round_values",
    "unpack_codes",
    "unpack_coefficients",
]
