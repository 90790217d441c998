"""Stored layers: how their tensors look on disk, in memory and at work.

A layer `L` that is not dense is stored as coefficients, and comes in three kinds:

- factored: weight ≈ dictionary @ coefficients. Tensors `L.weight`, `L.weight_mask`, `L.weight_u`; in `config.json` it
  has a `rank` and an `nnz`.
- follower: factored with the dictionary of another layer, its leader. No `L.weight_u`; in `config.json` its
  `dictionary` names the leader.
- sparse: the coefficients are the weight itself, as if the dictionary were the identity. No `L.weight_u`; in
  `config.json` it has an `nnz` alone.

`L.weight` are the stored coefficients as one row of numbers; `L.weight_mask` is one bit per coefficient, absent where
all are stored, except that a sparse layer has it always; `L.weight_u` is the transposed dictionary; `L.bias` is as
it was. The stock name with a one-dimensional shape is deliberate: a loader that does not know this format stops at the
shape, where it would give a layer of unknown names random numbers.
"""

from rocket_core.layers.factors import FACTOR_NAMES, LayerFactors, compose_weight, layer_tensors
from rocket_core.layers.kinds import FactorizedLinear, SparseLinear
from rocket_core.layers.layer_table import (
    FORMAT_VERSION,
    QUANT_METHOD,
    LayerEntry,
    format_version,
    quantization_config,
    read_entries,
)
from rocket_core.layers.packing import PackedCoefficients, mask_shape, pack_coefficients, unpack_coefficients
from rocket_core.layers.stored_linear import StoredLinear

__all__ = [
    "FACTOR_NAMES",
    "FORMAT_VERSION",
    "QUANT_METHOD",
    "FactorizedLinear",
    "LayerEntry",
    "LayerFactors",
    "PackedCoefficients",
    "SparseLinear",
    "StoredLinear",
    "compose_weight",
    "format_version",
    "layer_tensors",
    "mask_shape",
    "pack_coefficients",
    "quantization_config",
    "read_entries",
    "unpack_coefficients",
]
