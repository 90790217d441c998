"""Replacement of modules that store experts in common parameters by modules with linear layers, and back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange

from rocket_core.experts.layout import ExpertPart, ExpertsLayout, FusedParameter, find_layout, find_router
from rocket_core.experts.module import UnfusedExperts
from rocket_core.experts.names import unfused_conversions, unknown_conversions


def find_fused(model: PreTrainedModel) -> dict[str, ExpertsLayout]:
    """Return the modules of a model whose experts can be unfused; none if files store them in an unknown way."""
    found = {
        name: layout
        for name, module in model.named_modules()
        if (layout := find_layout(module)) is not None and _is_known_who_routes(model, name, layout)
    }
    return {} if found and unknown_conversions(_conversions(model)) else found


def unfuse(model: PreTrainedModel) -> None:
    """Give every expert its own linear layers, in place, with the weights that it has.

    `save_pretrained` then writes the names that transformers gives to the matrices of single experts.
    """
    found = find_fused(model)
    if not found:
        return
    for name, layout in found.items():
        model.set_submodule(name, _unfused(model.get_submodule(name), layout))
        # Some models give the experts of a block new weights before others are loaded, and expect those that they had.
        model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = True  # type: ignore[assignment]
    model._weight_conversions = unfused_conversions(_saved_conversions(model))  # type: ignore[assignment]


def fuse(model: PreTrainedModel) -> None:
    """Undo `unfuse`, in place, with the weights that the layers have by now; all of them must be dense."""
    unfused = unfused_modules(model)
    for name, module in unfused.items():
        model.set_submodule(name, _fused(module))
    if unfused:
        model._weight_conversions = _saved_conversions(model)  # type: ignore[assignment]


def has_unfused(model: PreTrainedModel) -> bool:
    """Return whether a model has unfused experts."""
    return bool(unfused_modules(model))


def unfused_modules(model: PreTrainedModel) -> dict[str, UnfusedExperts]:
    """Return the modules of a model that have unfused experts, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, UnfusedExperts)}


def fused_parameters(model: PreTrainedModel) -> dict[str, FusedParameter]:
    """Return the parameters that modules had before unfusing, by name."""
    found: dict[str, FusedParameter] = {}
    for name, module in unfused_modules(model).items():
        parts: dict[str, dict[str, ExpertPart]] = {}
        for parameter, part in module.layout.parts():
            parts.setdefault(part.stored.parameter, {})[f"{name}.{parameter}"] = part
        by_expert = module.layout.by_expert()
        for fused, shape in module.layout.shapes().items():
            found[f"{name}.{fused}"] = FusedParameter(shape=shape, by_expert=by_expert[fused], parts=parts[fused])
    return found


def unknown_experts(block: nn.Module) -> dict[str, torch.Size]:
    """Return the parameters of a block that hold the weights of several layers in a way that is not known."""
    convolutions = (nn.modules.conv._ConvNd,)
    return {
        f"{name}.{key}" if name else key: parameter.shape
        for name, module in block.named_modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter.ndim == 3 and min(parameter.shape) > 1
        if not isinstance(module, convolutions)
    }


def _is_known_who_routes(model: nn.Module, experts: str, layout: ExpertsLayout) -> bool:
    """Return whether experts are told which tokens they get, or there is a router that can be asked."""
    return layout.kind.routed or find_router(model.get_submodule(experts.rpartition(".")[0]), layout) is not None


def _unfused(module: nn.Module, layout: ExpertsLayout) -> UnfusedExperts:
    # Copied, as parts may be views of a parameter that would stay in memory.
    fused = {name: module.get_parameter(name).detach().view(shape) for name, shape in layout.by_expert().items()}
    wanted = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    module.to("meta")
    unfused = UnfusedExperts(module, layout)
    for name, part in layout.parts():
        value = part.of(fused[part.stored.parameter]).clone(memory_format=torch.contiguous_format)
        _set_parameter(unfused, name, value, requires_grad=wanted[part.stored.parameter])
    return unfused.train(module.training)


def _fused(unfused: UnfusedExperts) -> nn.Module:
    module, layout = unfused.original, unfused.layout
    parameters: Mapping[str, nn.Parameter] = dict(unfused.named_parameters())
    like = next(iter(parameters.values()))
    for name, shape in layout.shapes().items():
        value = torch.empty(shape, dtype=like.dtype, device=like.device)
        _set_parameter(module, name, value, requires_grad=like.requires_grad)
    by_expert = layout.by_expert()
    for name, part in layout.parts():
        fused = module.get_parameter(part.stored.parameter).detach().view(by_expert[part.stored.parameter])
        part.of(fused).copy_(parameters[name].detach())
    return module.train(unfused.training)


def _set_parameter(module: nn.Module, name: str, value: torch.Tensor, *, requires_grad: bool) -> None:
    owner, _, key = name.rpartition(".")
    setattr(module.get_submodule(owner), key, nn.Parameter(value, requires_grad=requires_grad))


def _conversions(model: PreTrainedModel) -> list[Any]:
    return list(get_model_conversion_mapping(model, add_legacy=False))


def _saved_conversions(model: PreTrainedModel) -> list[Any]:
    """Return transformers' conversions that saving a model reverts: its prefix is changed only if loading did that."""
    used = {repr(conversion) for conversion in getattr(model, "_weight_conversions", None) or ()}
    return [
        conversion
        for conversion in _conversions(model)
        if not isinstance(conversion, PrefixChange) or repr(conversion) in used
    ]
