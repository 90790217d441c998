"""Conversion of stock layers to stored layers, and back."""

import functools
from collections.abc import Iterable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rocket_core.errors import CheckpointFormatError, RocketError
from rocket_core.hf.names import StockLayer, disk_names, tied_layers
from rocket_core.layers import (
    CodedFactorizedLinear,
    CodedLinear,
    CodedSparseLinear,
    FactorizedLinear,
    LayerEntry,
    QuantizedEmbedding,
    QuantizedLinear,
    SparseLinear,
    StoredLinear,
    TiedEmbedding,
    TiedLinear,
    ValueCodes,
)
from rocket_core.layers.scaled_embedding import embedding_scale, stock_embedding
from rocket_core.layers.stored_linear import LayerOptions

StoredLayer: TypeAlias = StoredLinear | QuantizedEmbedding
"""A layer that is stored in another form than a dense weight."""

TiedLayer: TypeAlias = TiedLinear | TiedEmbedding
"""A layer that uses the table of a quantized embedding."""

_Layer = TypeVar("_Layer", bound=nn.Module)


def stored_layers(model: nn.Module) -> Iterable[tuple[str, StoredLayer]]:
    """Return the stored layers of a model, with their names in it; those tied to an embedding are among them."""
    kinds = (StoredLinear, QuantizedEmbedding)
    return ((name, module) for name, module in model.named_modules() if isinstance(module, kinds))


def stored_entries(model: PreTrainedModel) -> dict[str, LayerEntry]:
    """Return the table of a model's stored layers, by their names in the files.

    Raises:
        RocketError: a layer uses the dictionary of a layer that has been removed from the model.
        UnsupportedArchitectureError: transformers stores a layer together with others, or in pieces.
    """
    layers = {name: layer for name, layer in stored_layers(model) if not isinstance(layer, TiedLayer)}
    names = disk_names(model, layers)
    by_layer = {id(layer): names[name] for name, layer in layers.items()}
    return {names[name]: _entry(name, layer, by_layer) for name, layer in layers.items()}


def features(stock: StockLayer) -> tuple[int, int]:
    """Return `(d_in, d_out)` of a stock layer; an embedding has an output for every token."""
    if isinstance(stock, nn.Embedding):
        return stock.embedding_dim, stock.num_embeddings
    return (stock.nx, stock.nf) if isinstance(stock, Conv1D) else (stock.in_features, stock.out_features)


def install_layer(model: PreTrainedModel, name: str, layer: StoredLayer) -> None:
    """Replace a stock layer; with an embedding, also the heads and embeddings that are tied to it."""
    others = tied_layers(model, name) if isinstance(layer, QuantizedEmbedding) else []
    if isinstance(layer, QuantizedEmbedding):
        model.resize_token_embeddings = functools.partial(_keep_size, model)  # type: ignore[method-assign]
    model.set_submodule(name, layer)
    for other in others:
        assert isinstance(layer, QuantizedEmbedding)
        model.set_submodule(other, _tied_layer(model, other, layer).train(layer.training))
        # So that loading, device maps and saving treat the scales like the weight.
        model.all_tied_weights_keys[f"{other}.weight_scale"] = f"{name}.weight_scale"


def _tied_layer(model: PreTrainedModel, name: str, embedding: QuantizedEmbedding) -> TiedLayer:
    stock = model.get_submodule(name)
    if isinstance(stock, nn.Embedding):
        scale = embedding_scale(stock)
        assert scale is not None, "other embeddings are not found as tied layers"
        return TiedEmbedding(embedding, stock, scale=scale, layer_name=name)
    bias = stock.bias
    assert bias is None or isinstance(bias, nn.Parameter)
    if bias is not None:
        _keep_bias(model)
    return TiedLinear(embedding, bias=bias, layer_name=name)


def _keep_size(
    model: PreTrainedModel,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,  # noqa: ARG001 (of the base class)
) -> nn.Embedding:
    """Return the token embedding of a model with a quantized table if it has the requested size already.

    Raises:
        RocketError: it has another size, and codes cannot be resized.
    """
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding), "one of these is quantized"
    size = embedding.num_embeddings
    wanted = size if new_num_tokens is None else new_num_tokens
    if wanted != size or size % (pad_to_multiple_of or 1):
        raise RocketError(
            f"the token embedding is quantized, and its {size} rows cannot be resized; call model.dequantize() first"
        )
    return embedding


def _keep_bias(model: PreTrainedModel) -> None:
    """Prepare a model for a head with a bias that multiplies with a quantized table.

    transformers gives the bias of a tied head as many numbers as the first dimension of the weight has. When it ties
    weights again, it may look for them among parameters, of which a prepared head has others.
    """
    model._adjust_bias = _adjust_bias  # type: ignore[method-assign]
    model.tie_weights = functools.partial(_tie_known_weights, model)  # type: ignore[method-assign]


def _tie_known_weights(
    model: PreTrainedModel,
    missing_keys: set[str] | None = None,
    recompute_mapping: bool = True,  # noqa: ARG001 (of the base class)
) -> None:
    type(model).tie_weights(model, missing_keys=missing_keys, recompute_mapping=False)


def _adjust_bias(head: nn.Module, weight: Tensor) -> None:
    """Adjust the bias of a head whose weight transformers has tied, unless it is stored in another form."""
    if not isinstance(head, TiedLinear):
        PreTrainedModel._adjust_bias(None, head, weight)  # type: ignore[arg-type]  # it does not read the model


def empty_layer(
    stock: StockLayer, entry: LayerEntry, name: str, dictionary_owner: FactorizedLinear | None
) -> StoredLayer:
    """Return the packed layer for a stock layer, on the meta device.

    Args:
        stock: the layer to replace.
        entry: its entry in the table.
        name: name for messages.
        dictionary_owner: the layer whose dictionary it uses; None if it is not a follower.

    Raises:
        CheckpointFormatError: there are more coefficients than fit, the dictionary has another number of inputs, or an
            embedding is not quantized.
    """
    if isinstance(stock, nn.Embedding):
        return _empty_embedding(stock, entry, name)
    d_in, d_out = features(stock)
    options = LayerOptions(
        bias=stock.bias is not None,
        transposed=isinstance(stock, Conv1D),
        layer_name=name,
        device="meta",
        dtype=stock.weight.dtype,
    )
    if entry.is_quantized:
        assert entry.scale_exponent is not None
        code_format, exponent = entry.code_format, entry.scale_exponent
        coded = QuantizedLinear(
            d_in, d_out, code_format=code_format, scale_exponent=exponent, coded_bytes=entry.coded_bytes, **options
        )
        return _marked(coded)
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
    if entry.bits is not None:
        return _coded_layer((d_in, d_out), entry, dictionary_owner, options)
    if entry.rank is None:
        return SparseLinear(d_in, d_out, nnz=entry.nnz, **options)
    return FactorizedLinear(d_in, d_out, rank=entry.rank, nnz=entry.nnz, dictionary_owner=dictionary_owner, **options)


def _coded_layer(
    shape: tuple[int, int], entry: LayerEntry, dictionary_owner: FactorizedLinear | None, options: LayerOptions
) -> CodedLinear:
    assert entry.nnz is not None
    assert entry.scale_exponent is not None
    codes_of = ValueCodes(
        format=entry.code_format, exponent=entry.scale_exponent, dictionary_exponent=entry.dictionary_exponent
    )
    if entry.rank is None:
        return _marked(CodedSparseLinear(*shape, nnz=entry.nnz, codes_of=codes_of, **options))
    layer = CodedFactorizedLinear(
        *shape, rank=entry.rank, nnz=entry.nnz, codes_of=codes_of, dictionary_owner=dictionary_owner, **options
    )
    return _marked(layer)


def _empty_embedding(stock: nn.Embedding, entry: LayerEntry, name: str) -> QuantizedEmbedding:
    if not entry.is_quantized or entry.scale_exponent is None or entry.coded_bytes is not None:
        raise CheckpointFormatError(
            f"quantization_config: {name!r} is an embedding, which can only be quantized with packed codes; check that "
            "config.json belongs to these weights"
        )
    scale = embedding_scale(stock)
    assert scale is not None, "other embeddings are not found as stock layers"
    embedding = QuantizedEmbedding(
        stock.num_embeddings,
        stock.embedding_dim,
        code_format=entry.code_format,
        scale_exponent=entry.scale_exponent,
        padding_idx=stock.padding_idx,
        stock_class=type(stock),
        scale=scale,
        layer_name=name,
        device="meta",
        dtype=stock.weight.dtype,
    )
    return _marked(embedding)


def _marked(layer: _Layer) -> _Layer:
    """Keep transformers from initialising bytes that it leaves on the disk with random numbers; return the layer."""
    for parameter in (parameter for parameter in layer.parameters() if parameter.dtype == torch.uint8):
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return layer


def restore_layers(model: PreTrainedModel, dtype: torch.dtype | None) -> None:
    """Replace all stored layers with stock layers, in place; tied ones share the weight of their embedding again."""
    layers = dict(stored_layers(model))
    tied = {name: layer for name, layer in layers.items() if isinstance(layer, TiedLayer)}
    names = {id(layer): name for name, layer in layers.items()}
    for name in tied:
        del layers[name]
    while layers:  # last to first, releasing the factors of each layer once it is replaced
        name, layer = layers.popitem()
        model.set_submodule(name, _stock_layer(layer, dtype))
    for name, layer in tied.items():
        weight = model.get_submodule(names[id(layer.embedding)]).weight
        assert isinstance(weight, nn.Parameter)
        model.set_submodule(name, _stock_tied(layer, weight).train(layer.training))
        model.all_tied_weights_keys.pop(f"{name}.weight_scale", None)
    for attribute in ("_adjust_bias", "tie_weights", "resize_token_embeddings"):  # those of `install_layer`
        vars(model).pop(attribute, None)


def _stock_tied(layer: TiedLayer, weight: nn.Parameter) -> nn.Linear | nn.Embedding:
    if isinstance(layer, TiedEmbedding):
        return _stock_embedding(layer, weight)
    with torch.device("meta"):
        stock = nn.Linear(layer.in_features, layer.out_features, bias=False)
    stock.bias, stock.weight = layer.bias, weight
    return stock


def _stock_embedding(layer: QuantizedEmbedding, weight: nn.Parameter) -> nn.Embedding:
    stock = stock_embedding(layer.stock_class, layer.embedding_dim, layer.scale).to(weight.device)
    stock.num_embeddings, stock.padding_idx = layer.num_embeddings, layer.padding_idx
    stock.weight = weight
    return stock


def _stock_layer(layer: StoredLayer, dtype: torch.dtype | None) -> StockLayer:
    """Return the stock layer with the composed weight, in the given dtype or in the layer's own."""
    weight = layer.dense_weight(dtype)
    stock: StockLayer
    if isinstance(layer, QuantizedEmbedding):
        return _stock_embedding(layer, nn.Parameter(weight)).train(layer.training)
    with torch.device("meta"):
        if layer.transposed:
            stock = Conv1D(layer.out_features, layer.in_features)
        else:
            stock = nn.Linear(layer.in_features, layer.out_features)
    stock.weight = nn.Parameter(weight.T.contiguous() if layer.transposed else weight)
    stock.bias = layer.bias
    return stock.train(layer.training)


def _entry(name: str, layer: StoredLayer, disk_name_of: dict[int, str]) -> LayerEntry:
    if isinstance(layer, QuantizedEmbedding):
        return LayerEntry.of_codes(layer.code_format, layer.scale_exponent)
    if isinstance(layer, QuantizedLinear):
        return LayerEntry.of_codes(layer.code_format, layer.scale_exponent, layer.disk_coded_bytes)
    codes = _value_codes(layer)
    if not isinstance(layer, FactorizedLinear):
        assert isinstance(layer, SparseLinear)
        return LayerEntry(nnz=layer.nnz, **codes)
    owner = None if layer.dictionary_owner is layer else disk_name_of.get(id(layer.dictionary_owner))
    if owner is None and layer.dictionary_owner is not layer:
        raise RocketError(
            f"layer {name!r} takes the dictionary of {layer.dictionary_owner.layer_name!r}, which is no longer a layer "
            "of the model; call model.dequantize() first"
        )
    return LayerEntry(rank=layer.rank, nnz=layer.nnz, dictionary=owner, **codes)


def _value_codes(layer: StoredLayer) -> dict[str, Any]:
    """Return the keys of codes of a layer made of coefficients."""
    if not isinstance(layer, CodedLinear):
        return {}
    codes_of = layer.codes_of
    return {
        "bits": codes_of.format.bits,
        "group_size": codes_of.format.group_size,
        "scale_bits": codes_of.format.scale_bits,
        "scale_exponent": codes_of.exponent,
        "dictionary_exponent": codes_of.dictionary_exponent,
    }
