"""Compression of a model in memory, by replacing layers with stored ones."""

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from rocket_core.errors import AlreadyQuantizedError, InvalidConfigError
from rocket_core.experts import find_fused, is_expert_name, unfuse
from rocket_core.hf.names import disk_names, find_stock
from rocket_core.hf.quantizer import RocketConfig, RocketHfQuantizer
from rocket_core.hf.replacement import StoredLayer, empty_layer, features, install_layer, stored_entries, stored_layers
from rocket_core.layers import (
    QUANT_METHOD,
    CodedLinear,
    FactorizedLinear,
    LayerEntry,
    LayerFactors,
    QuantizedEmbedding,
    StoredWeight,
    TiedLinear,
    coded_entry,
    layer_tensors,
)
from rocket_core.linalg.integer_codes import RoundedWeight


def attach_factors(model: PreTrainedModel, factors: Mapping[str, StoredWeight]) -> PreTrainedModel:
    """Replace layers with their factors or codes, in place, so that `save_pretrained` writes an artifact.

    Matrices of experts are named as if each expert had its own module, `model.layers.0.mlp.experts.3.gate_proj`; the
    model's experts are then replaced by such modules first.

    Embeddings can be replaced with codes; heads that are tied to them then multiply with these.

    Args:
        model: a model with plain weights, or one returned by this function.
        factors: factors or a rounded weight by module name; they are moved to the device of the weight they replace,
            and factors converted to its dtype. The owner of a shared dictionary must be among them, or have been
            attached before.

    Returns:
        The same model.

    Raises:
        InvalidConfigError: a name, a shape or a shared dictionary does not fit the model.
        AlreadyQuantizedError: the model is quantized by another method.
        UnsupportedArchitectureError: transformers does not store a layer under its own name.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not isinstance(quantizer, RocketHfQuantizer):
        raise AlreadyQuantizedError(f"{type(model).__name__} is quantized already; load its plain weights")
    if any(is_expert_name(name, find_fused(model)) for name in factors):
        unfuse(model)
    disk_names(model, factors)
    for name, layer in _make_layers(model, factors).items():
        install_layer(model, name, layer)
    for _, layer in stored_layers(model):
        if isinstance(layer, TiedLinear):
            layer.unpack_()
    config = RocketConfig(stored_entries(model))
    marks = {  # those of `from_pretrained`
        "hf_quantizer": RocketHfQuantizer(config, pre_quantized=True),
        "quantization_method": QUANT_METHOD,
        "is_quantized": True,
    }
    for attribute, value in marks.items():
        setattr(model, attribute, value)
    model.config.quantization_config = config
    return model


def _make_layers(model: PreTrainedModel, factors: Mapping[str, StoredWeight]) -> dict[str, StoredLayer]:
    made: dict[str, StoredLayer] = {}
    attached = dict(stored_layers(model))
    followers = {name: one for name, one in factors.items() if isinstance(one, LayerFactors) and one.dictionary_owner}
    # Owners come before those that share their dictionaries.
    for name in sorted(factors, key=followers.__contains__):
        owner = _find_owner(name, followers[name], attached | made) if name in followers else None
        made[name] = _make_layer(model, name, factors[name], owner)
    return made


def _find_owner(name: str, factors: LayerFactors, layers: Mapping[str, StoredLayer]) -> FactorizedLinear:
    owner_name = str(factors.dictionary_owner)
    owner = layers.get(owner_name)
    if not isinstance(owner, FactorizedLinear) or owner.dictionary_owner is not owner:
        raise InvalidConfigError(
            f"layer {name!r} shares the dictionary of {owner_name!r}, which has none; give its factors too"
        )
    assert factors.dictionary is not None
    atoms = owner.atoms()
    coded = isinstance(owner, CodedLinear)
    if coded != bool(factors.value_codes) or not torch.equal(factors.dictionary.T.to(atoms), atoms):
        raise InvalidConfigError(f"layer {name!r} has another dictionary than {owner_name!r}, with which it shares it")
    return owner


def _make_layer(
    model: PreTrainedModel, name: str, factors: StoredWeight, owner: FactorizedLinear | None
) -> StoredLayer:
    """Return the unpacked layer with these factors, and with dtype, device, mode and bias of the stock layer."""
    stock = find_stock(model, name)
    if stock is None:
        raise InvalidConfigError(f"the model has no linear layer or embedding {name!r}")
    if factors.shape != features(stock):
        raise InvalidConfigError(
            f"layer {name!r} has {features(stock)} inputs and outputs, its factors {factors.shape}"
        )
    tensors = {key: value.to(stock.weight.device) for key, value in layer_tensors(factors, stock.weight.dtype).items()}
    layer = empty_layer(stock, _entry(name, factors, tensors["weight"]), name, owner)
    layer.load_state_dict(tensors, strict=False, assign=True)
    if isinstance(layer, QuantizedEmbedding) or isinstance(stock, nn.Embedding):
        return layer.train(stock.training)
    layer.bias = stock.bias
    return layer.train(stock.training).unpack_()


def _entry(name: str, factors: StoredWeight, weight: torch.Tensor) -> LayerEntry:
    """Return the table's entry of a layer, given its stored coefficients or codes."""
    if isinstance(factors, RoundedWeight):
        coded_bytes = weight.numel() if factors.entropy_coded else None
        return LayerEntry.of_codes(factors.scales.format, factors.scales.exponent, coded_bytes)
    rank = None if factors.dictionary is None else factors.dictionary.shape[1]
    if factors.nnz == 0 or (rank is not None and rank != factors.coefficients.shape[0]):
        raise InvalidConfigError(
            f"layer {name!r} has {rank} atoms, coefficients for {factors.coefficients.shape[0]}, and stores "
            f"{factors.nnz} of them; the first two must agree, and the last be at least 1"
        )
    if factors.value_codes:
        return coded_entry(factors)
    return LayerEntry(rank=rank, nnz=factors.nnz, dictionary=factors.dictionary_owner)
