"""Layer names in files and in models, which differ in some families."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rocket_core.errors import CheckpointFormatError, UnsupportedArchitectureError


def disk_names(model: PreTrainedModel, modules: Iterable[str]) -> dict[str, str]:
    """Return the names that `save_pretrained` gives to linear layers, by their names in the model.

    Raises:
        UnsupportedArchitectureError: transformers stores a layer together with others, or in pieces.
    """
    conversions = _conversions(model, saving=True)
    names = {}
    for name in modules:
        key = f"{name}.weight"
        for conversion in conversions:
            renamed, pattern = conversion.rename_source_key(key)
            if pattern is not None and hasattr(conversion, "operations"):
                raise UnsupportedArchitectureError(
                    f"layer {name!r} is stored as a part of {renamed!r} and cannot be stored factored; ignore it"
                )
            key = renamed
        names[name] = key.removesuffix(".weight")
    return names


def find_modules(model: PreTrainedModel, names: Iterable[str]) -> dict[str, tuple[str, nn.Linear | Conv1D]]:
    """Return, for each name of a layer in the files, its name in the model and the stock layer.

    Raises:
        CheckpointFormatError: the model has no such linear layer.
    """
    conversions = _conversions(model, saving=False)
    modules = {}
    for name in names:
        key = f"{name}.weight"
        for conversion in conversions:
            key, _ = conversion.rename_source_key(key)
        candidates = with_and_without(model.base_model_prefix, name, key.removesuffix(".weight"))
        matches = ((candidate, stock_linear(model, candidate)) for candidate in candidates)
        match = next(((candidate, stock) for candidate, stock in matches if stock is not None), None)
        if match is None:
            raise CheckpointFormatError(
                f"config.json lists the layer {name!r}, and {type(model).__name__} has no such linear layer; "
                "check that config.json belongs to these weights"
            )
        modules[name] = match
    return modules


def with_and_without(prefix: str, *names: str) -> list[str]:
    """Return the names as given, then without and with the prefix that models with a head have and base models lack."""
    bare = [name.removeprefix(f"{prefix}.") for name in names]
    return [*names, *bare, *(f"{prefix}.{name}" for name in bare)]


def stock_linear(model: nn.Module, name: str) -> nn.Linear | Conv1D | None:
    """Return the stock layer of that name, or None. Subclasses are excluded, as they may compute something else."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    return module if type(module) is nn.Linear or type(module) is Conv1D else None


def _conversions(model: PreTrainedModel, *, saving: bool) -> list[Any]:
    """Return transformers' conversions of names (and tensors) between files and modules, in order of application."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:  # before version 5, modules have the names of the files
        return []
    if not saving:
        return list(get_model_conversion_mapping(model))
    used = getattr(model, "_weight_conversions", None)  # those of `from_pretrained`
    if used is None:
        used = get_model_conversion_mapping(model, add_legacy=False)
        used = [conversion for conversion in used if not isinstance(conversion, PrefixChange)]
    return [conversion.reverse_transform() for conversion in reversed(used)]
