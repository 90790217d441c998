"""Layer names in files and in models, which differ in some families."""

from collections.abc import Collection, Iterable
from typing import Any, TypeAlias

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange
from transformers.pytorch_utils import Conv1D

from rocket_core.errors import CheckpointFormatError, UnsupportedArchitectureError
from rocket_core.experts import find_fused, has_unfused, is_expert_name, unfused_conversions
from rocket_core.layers import is_stock_linear
from rocket_core.layers.scaled_embedding import embedding_scale

StockLayer: TypeAlias = nn.Linear | Conv1D | nn.Embedding
"""A layer that a stored one replaces."""


def disk_names(model: PreTrainedModel, modules: Iterable[str]) -> dict[str, str]:
    """Return the names that `save_pretrained` gives to layers, by their names in the model.

    Raises:
        UnsupportedArchitectureError: transformers stores a layer together with others, or in pieces.
    """
    names = [*modules]
    keys = disk_keys(model, (f"{name}.weight" for name in names))
    return {name: keys[f"{name}.weight"].removesuffix(".weight") for name in names}


def disk_keys(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, str]:
    """Return the names that `save_pretrained` gives to tensors, by their names in the model's state dict.

    Raises:
        UnsupportedArchitectureError: transformers stores a tensor together with others, or in pieces.
    """
    conversions = _conversions(model, saving=True)
    names = {}
    for key in keys:
        name = key
        for conversion in conversions:
            renamed, pattern = conversion.rename_source_key(name)
            if pattern is not None and hasattr(conversion, "operations"):
                raise UnsupportedArchitectureError(
                    f"layer {key.rpartition('.')[0]!r} is stored as a part of {renamed!r} and cannot be stored "
                    "factored; ignore it"
                )
            name = renamed
        names[key] = name
    return names


def find_modules(model: PreTrainedModel, names: Collection[str]) -> dict[str, tuple[str, StockLayer]]:
    """Return, for each name of a layer in the files, its name in the model and the stock layer.

    A model without a head lacks layers of the head, which are left out.

    Raises:
        CheckpointFormatError: the model has no such layer.
    """
    within = f"{model.base_model_prefix}."
    headless = model.get_output_embeddings() is None and any(name.startswith(within) for name in names)
    conversions = _conversions(model, saving=False)
    modules = {}
    for name in names:
        key = _renamed(f"{name}.weight", conversions).removesuffix(".weight")
        candidates = with_and_without(model.base_model_prefix, name, key)
        matches = ((candidate, find_stock(model, candidate)) for candidate in candidates)
        match = next(((candidate, stock) for candidate, stock in matches if stock is not None), None)
        if match is None and headless and not name.startswith(within):
            continue
        if match is None:
            raise CheckpointFormatError(
                f"config.json lists the layer {name!r}, and {type(model).__name__} has no such linear layer or "
                "embedding; check that config.json belongs to these weights"
            )
        modules[name] = match
    return modules


def with_and_without(prefix: str, *names: str) -> list[str]:
    """Return the names as given, then without and with the prefix that models with a head have and base models lack."""
    bare = [name.removeprefix(f"{prefix}.") for name in names]
    return [*names, *bare, *(f"{prefix}.{name}" for name in bare)]


def names_experts(model: PreTrainedModel, names: Iterable[str]) -> bool:
    """Return whether some of the names of layers in the files are those of experts that the model has not unfused."""
    modules = find_fused(model)
    if not modules:
        return False
    conversions = unfused_conversions(_conversions(model, saving=False))
    possible = (with_and_without(model.base_model_prefix, name, _renamed(name, conversions)) for name in names)
    return any(is_expert_name(name, modules) for found in possible for name in found)


def is_merged(model: PreTrainedModel, key: str) -> bool:
    """Return whether transformers merges a tensor of the files with others while it loads them.

    Args:
        model: the model, whose experts may be unfused.
        key: name of the tensor in the files.
    """
    converters = [one for one in get_model_conversion_mapping(model) if hasattr(one, "operations")]
    return any(converter.rename_source_key(key)[1] is not None for converter in converters)


def find_stock(model: nn.Module, name: str) -> StockLayer | None:
    """Return the stock layer of that name, or None.

    Subclasses that compute something else are excluded, but for embeddings that only scale.
    """
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    if is_stock_linear(module):
        assert isinstance(module, nn.Linear | Conv1D), "no other module is a stock linear layer"
        return module
    if isinstance(module, nn.Embedding) and embedding_scale(module) is not None:
        return module
    return None


def tied_layers(model: PreTrainedModel, embedding: str) -> list[str]:
    """Return the linear layers and embeddings whose weight is tied to that of an embedding."""
    source = f"{embedding}.weight"
    targets = [target for target, origin in model.all_tied_weights_keys.items() if origin == source]
    names = [target.removesuffix(".weight") for target in targets if target.endswith(".weight")]
    modules = {name: model.get_submodule(name) for name in names}
    return [
        name for name, module in modules.items() if type(module) is nn.Linear or embedding_scale(module) is not None
    ]


def _renamed(name: str, conversions: Iterable[Any]) -> str:
    for conversion in conversions:
        name, _ = conversion.rename_source_key(name)
    return name


def _conversions(model: PreTrainedModel, *, saving: bool) -> list[Any]:
    """Return transformers' conversions of names (and tensors) between files and modules, in order of application."""
    if not saving:
        found = list(get_model_conversion_mapping(model))
        return unfused_conversions(found) if has_unfused(model) else found
    used = getattr(model, "_weight_conversions", None)  # those of `from_pretrained`
    if used is None:
        used = get_model_conversion_mapping(model, add_legacy=False)
        used = [conversion for conversion in used if not isinstance(conversion, PrefixChange)]
    return [conversion.reverse_transform() for conversion in reversed(used)]
