"""The continuous numbers of modules with stored layers: which they are, and how to train them."""

from collections.abc import Iterator, Mapping
from typing import TypeGuard

import torch
from torch import nn

from rocket_core.layers import QuantizedEmbedding, QuantizedLinear, StoredLinear, TiedLinear
from rocket_core.refinement.scaled_linear import ScaledLinear, has_float_scales


def continuous_names(module: nn.Module) -> frozenset[str]:
    """Return the names of the tensors in a module's state dict that training may change; all others stay as they are.

    Args:
        module: a layer, a block or a model, not opened for training.
    """
    return frozenset(
        f"{prefix}.{name}" if prefix else name for prefix, part in module.named_modules() for name in _own_names(part)
    )


def open_values(module: nn.Module) -> None:
    """Prepare a module for training in place: all of it is in float32, and what is continuous requires gradients.

    Coefficient layers are unpacked: their coefficients outside the support get no gradient and stay zero. Quantized
    layers with scales in float16 become `ScaledLinear`, the others are unpacked.

    Args:
        module: a block or a model, which is not a stored layer itself. No part of it is offloaded.
    """
    nn.Module.float(module)  # transformers' own refuses to cast a quantized model
    for name, part in [*module.named_modules()]:
        if _has_continuous_scales(part):
            module.set_submodule(name, ScaledLinear(part))
        elif isinstance(part, StoredLinear):
            part.unpack_()
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.is_floating_point())


@torch.no_grad()
def round_values(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Round numbers of a module that was opened for training, in place, to what can be stored.

    Args:
        module: a block or a model.
        dtypes: the dtype in which each is stored, by the name in the state dict of the closed module; others are not
            rounded, and scales always as they are stored.
    """
    for name, part in module.named_modules():
        if isinstance(part, ScaledLinear):
            part.round_scales()
        for own, parameter in _continuous_parameters(part):
            dtype = dtypes.get(f"{name}.{own}" if name else own)
            if dtype is not None:
                parameter.copy_(parameter.to(dtype))


def close_values(module: nn.Module) -> None:
    """Return a module that was opened for training to its stored form in place.

    Its state dict then has the tensors that it had before, those of `continuous_names` with new values: scales as
    float16, all others in float32, to be rounded to the dtype that each is stored in.
    """
    for name, part in [*module.named_modules()]:
        if isinstance(part, ScaledLinear):
            module.set_submodule(name, part.restored())
    for parameter in module.parameters():
        parameter.requires_grad_(False)


def _own_names(part: nn.Module) -> list[str]:
    """Return the continuous tensors of a module itself, without those of its submodules."""
    names = [name for name, _ in _continuous_parameters(part)]
    return [*names, "weight_scale"] if _has_continuous_scales(part) else names


def _continuous_parameters(part: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the continuous parameters of a module itself, by their name in its state dict."""
    if isinstance(part, QuantizedEmbedding | TiedLinear):
        return
    for name, parameter in part.named_parameters(recurse=False):
        if parameter.is_floating_point():
            # State dicts have the packed form of a stored layer, whatever its parameter is called in memory.
            yield "weight" if isinstance(part, StoredLinear) and parameter is part.stored else name, parameter


def _has_continuous_scales(part: nn.Module) -> TypeGuard[QuantizedLinear]:
    return isinstance(part, QuantizedLinear) and not isinstance(part, TiedLinear) and has_float_scales(part)
