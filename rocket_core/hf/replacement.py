"""Conversion of stock layers to stored layers, and back."""

from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rocket_core.errors import CheckpointFormatError, RocketError
from rocket_core.hf.names import disk_names
from rocket_core.layers import FactorizedLinear, LayerEntry, QuantizedLinear, SparseLinear, StoredLinear
from rocket_core.layers.stored_linear import LayerOptions


def stored_layers(model: nn.Module) -> Iterable[tuple[str, StoredLinear]]:
    """Return the stored layers of a model, with their names in it."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, StoredLinear))


def stored_entries(model: PreTrainedModel) -> dict[str, LayerEntry]:
    """Return the table of a model's stored layers, by their names in the files.

    Raises:
        RocketError: a layer uses the dictionary of a layer that has been removed from the model.
        UnsupportedArchitectureError: transformers stores a layer together with others, or in pieces.
    """
    layers = dict(stored_layers(model))
    names = disk_names(model, layers)
    by_layer = {id(layer): names[name] for name, layer in layers.items()}
    return {names[name]: _entry(name, layer, by_layer) for name, layer in layers.items()}


def features(stock: nn.Linear | Conv1D) -> tuple[int, int]:
    """Return `(d_in, d_out)` of a stock layer."""
    return (stock.nx, stock.nf) if isinstance(stock, Conv1D) else (stock.in_features, stock.out_features)


def empty_layer(
    stock: nn.Linear | Conv1D, entry: LayerEntry, name: str, dictionary_owner: FactorizedLinear | None
) -> StoredLinear:
    """Return the packed layer for a stock layer, on the meta device.

    Args:
        stock: the layer to replace.
        entry: its entry in the table.
        name: name for messages.
        dictionary_owner: the layer whose dictionary it uses; None if it is not a follower.

    Raises:
        CheckpointFormatError: there are more coefficients than fit, or the dictionary has another number of inputs.
    """
    d_in, d_out = features(stock)
    options = LayerOptions(
        bias=stock.bias is not None,
        transposed=isinstance(stock, Conv1D),
        layer_name=name,
        device="meta",
        dtype=stock.weight.dtype,
    )
    if entry.scale_exponent is not None:
        layer = QuantizedLinear(
            d_in,
            d_out,
            code_format=entry.code_format,
            scale_exponent=entry.scale_exponent,
            coded_bytes=entry.coded_bytes,
            **options,
        )
        for parameter in (layer.weight, layer.weight_scale):
            # Else transformers tries to initialise bytes that it leaves on the disk with random numbers.
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        return layer
    assert entry.nnz is not None
    room = (d_in if entry.rank is None else entry.rank) * d_out
    if entry.nnz > room:
        raise CheckpointFormatError(
            f"quantization_config: layer {name!r} has {entry.nnz} coefficients; its {d_out} outputs "
            f"{'and inputs' if entry.rank is None else f'and rank {entry.rank}'} leave room for {room}; check that "
            "config.json belongs to these weights"
        )
    if dictionary_owner is not None and dictionary_owner.in_features != d_in:
        raise CheckpointFormatError(
            f"quantization_config: layer {name!r} has {d_in} inputs, and {dictionary_owner.layer_name!r}, whose "
            f"dictionary it takes, {dictionary_owner.in_features}; check that config.json belongs to these weights"
        )
    if entry.rank is None:
        return SparseLinear(d_in, d_out, nnz=entry.nnz, **options)
    return FactorizedLinear(d_in, d_out, rank=entry.rank, nnz=entry.nnz, dictionary_owner=dictionary_owner, **options)


def stock_layer(layer: StoredLinear, dtype: torch.dtype | None) -> nn.Linear | Conv1D:
    """Return the stock layer with the composed weight, in the given dtype or in the layer's own."""
    weight = layer.dense_weight(dtype)
    stock: nn.Linear | Conv1D
    with torch.device("meta"):
        if layer.transposed:
            stock = Conv1D(layer.out_features, layer.in_features)
        else:
            stock = nn.Linear(layer.in_features, layer.out_features)
    stock.weight = nn.Parameter(weight.T.contiguous() if layer.transposed else weight)
    stock.bias = layer.bias
    return stock.train(layer.training)


def _entry(name: str, layer: StoredLinear, disk_name_of: dict[int, str]) -> LayerEntry:
    if isinstance(layer, QuantizedLinear):
        return LayerEntry.of_codes(layer.code_format, layer.scale_exponent, layer.disk_coded_bytes)
    if not isinstance(layer, FactorizedLinear):
        assert isinstance(layer, SparseLinear)
        return LayerEntry(nnz=layer.nnz)
    owner = None if layer.dictionary_owner is layer else disk_name_of.get(id(layer.dictionary_owner))
    if owner is None and layer.dictionary_owner is not layer:
        raise RocketError(
            f"layer {name!r} takes the dictionary of {layer.dictionary_owner.layer_name!r}, which is no longer a layer "
            "of the model; call model.dequantize() first"
        )
    return LayerEntry(rank=layer.rank, nnz=layer.nnz, dictionary=owner)
