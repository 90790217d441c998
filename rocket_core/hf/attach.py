"""Compression of a model in memory, by replacing layers with their factors."""

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from rocket_core.errors import AlreadyQuantizedError, InvalidConfigError
from rocket_core.hf.names import disk_names, stock_linear
from rocket_core.hf.quantizer import RocketConfig, RocketHfQuantizer
from rocket_core.hf.replacement import empty_layer, features, stored_entries, stored_layers
from rocket_core.layers import (
    QUANT_METHOD,
    FactorizedLinear,
    LayerEntry,
    LayerFactors,
    StoredLinear,
    layer_tensors,
)


def attach_factors(model: PreTrainedModel, factors: Mapping[str, LayerFactors]) -> PreTrainedModel:
    """Replace linear layers with their factors, in place, so that `save_pretrained` writes an artifact.

    Args:
        model: a model with plain weights, or one returned by this function.
        factors: factors by module name; they are converted to dtype and device of the weight they replace. The
            owner of a shared dictionary must be among them, or have been attached before.

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
    disk_names(model, factors)
    for name, layer in _make_layers(model, factors).items():
        model.set_submodule(name, layer)
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


def _make_layers(model: PreTrainedModel, factors: Mapping[str, LayerFactors]) -> dict[str, StoredLinear]:
    made: dict[str, StoredLinear] = {}
    attached = dict(stored_layers(model))
    for name in sorted(factors, key=lambda each: factors[each].dictionary_owner is not None):  # owners first
        owner_name = factors[name].dictionary_owner
        owner = None
        if owner_name is not None:
            owner = _find_owner(name, factors[name], owner_name, (attached | made).get(owner_name))
        made[name] = _make_layer(model, name, factors[name], owner)
    return made


def _find_owner(name: str, factors: LayerFactors, owner_name: str, owner: StoredLinear | None) -> FactorizedLinear:
    if not isinstance(owner, FactorizedLinear) or owner.dictionary_owner is not owner:
        raise InvalidConfigError(
            f"layer {name!r} shares the dictionary of {owner_name!r}, which has none; give its factors too"
        )
    assert factors.dictionary is not None
    if not torch.equal(factors.dictionary.T.to(owner.weight_u), owner.weight_u):
        raise InvalidConfigError(f"layer {name!r} has another dictionary than {owner_name!r}, with which it shares it")
    return owner


def _make_layer(
    model: PreTrainedModel, name: str, factors: LayerFactors, owner: FactorizedLinear | None
) -> StoredLinear:
    """Return the unpacked layer with these factors, and with dtype, device, mode and bias of the stock layer."""
    stock = stock_linear(model, name)
    if stock is None:
        raise InvalidConfigError(f"the model has no linear layer {name!r}")
    if factors.shape != features(stock):
        raise InvalidConfigError(
            f"layer {name!r} has {features(stock)} inputs and outputs, its factors {factors.shape}"
        )
    tensors = {key: value.to(stock.weight.device) for key, value in layer_tensors(factors, stock.weight.dtype).items()}
    rank = None if factors.dictionary is None else factors.dictionary.shape[1]
    if tensors["weight"].numel() == 0 or (rank is not None and rank != factors.coefficients.shape[0]):
        raise InvalidConfigError(
            f"layer {name!r} has {rank} atoms, coefficients for {factors.coefficients.shape[0]}, and stores "
            f"{tensors['weight'].numel()} of them; the first two must agree, and the last be at least 1"
        )
    entry = LayerEntry(rank=rank, nnz=tensors["weight"].numel(), dictionary=factors.dictionary_owner)
    layer = empty_layer(stock, entry, name, owner)
    layer.load_state_dict(tensors, strict=False, assign=True)
    layer.bias = stock.bias
    return layer.train(stock.training).unpack_()
