"""Quantized layers as compressed-tensors stores them, read by vLLM and by `transformers`.

A layer of integer codes (`pack-quantized`) L has the tensors

- `L.weight_packed`: codes + 2^(bits - 1) of an output in words of 32 bits, the first input in the lowest bits,
- `L.weight_scale`: a scale for each output and group, in the model's dtype,
- `L.weight_shape`: `(d_out, d_in)`.

References:
    compressed-tensors, `compressors/pack_quantized`, versions 0.15 to 0.20. Codes of 4 and 8 bits have the same bytes
    in all of them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor, nn
from transformers import PreTrainedModel

from rocket_core.candidates import PACKED_NAMES
from rocket_core.checkpoint import TensorPlan, plan_tensor
from rocket_core.experts import expert_projection, unfused_modules
from rocket_core.exports import block_tensors
from rocket_core.linalg.integer_codes import RoundedWeight
from rocket_core.sizes.block_types import BlockType
from rocket_core.sizes.code_format import CodeFormat

QUANT_METHOD = "compressed-tensors"
"""Value of `quant_method` in `config.json`."""

_FORMAT = "pack-quantized"
_EXPERTS = r"re:.*\.experts\..*"
_WORD_BITS = 32


def part_shapes(
    shape: tuple[int, int], code_format: CodeFormat, dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each tensor of a layer, by the end of its name.

    Args:
        shape: `(d_in, d_out)` of the layer.
        code_format: bits and groups; the codes of an output fill whole words.
        dtype: dtype of the model.
    """
    d_in, d_out = shape
    shapes = (d_out, d_in * code_format.bits // _WORD_BITS), (d_out, code_format.groups(d_in)), (2,)
    return dict(zip(PACKED_NAMES, zip((torch.int32, dtype, torch.int64), shapes, strict=True), strict=True))


def plan_layer(
    base: str, shape: tuple[int, int], code_format: CodeFormat, dtype: torch.dtype, read: Callable[[], RoundedWeight]
) -> Iterator[TensorPlan]:
    """Plan the tensors of a layer.

    Args:
        base: their names up to `weight`.
        shape: `(d_in, d_out)` of the layer.
        code_format: bits and groups.
        dtype: dtype of the model and of scales; it represents the scales exactly.
        read: returns codes and scales; called for each tensor when it is written.
    """
    d_in, d_out = shape
    makers: tuple[Callable[[], Tensor], ...] = (
        lambda: _packed(read()),
        lambda: _scales(read(), dtype),
        lambda: torch.tensor([d_out, d_in]),
    )
    for make, (part, stored) in zip(makers, part_shapes(shape, code_format, dtype).items(), strict=True):
        yield plan_tensor(base + part, *stored, make)


def model_config(
    model: PreTrainedModel, formats: Mapping[str, tuple[CodeFormat | BlockType, int]], disk_name: Callable[[str], str]
) -> dict[str, Any] | None:
    """Return the `quantization_config` of a whole model; None if all of its layers are dense.

    Args:
        model: the model, whose experts have a layer each.
        formats: as in `quantization_config`.
        disk_name: returns the name that a router has in the files.
    """
    mixtures = unfused_modules(model)
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    dense = [name for name in linear if name not in formats]
    dense += [disk_name(name) for block in mixtures for name in _routers(model, block.rpartition(".")[0])]
    experts = {name for name in linear if expert_projection(name, mixtures) is not None}
    return quantization_config(formats, dense, experts=experts) if formats else None


def quantization_config(
    formats: Mapping[str, tuple[CodeFormat | BlockType, int]], dense: Sequence[str], *, experts: Collection[str] = ()
) -> dict[str, Any]:
    """Return the `quantization_config` of `config.json`: a group of layers for each format.

    Groups of more bits come first: `transformers` with `dequantize=True` takes the bits of the first group for all
    layers, which fails for narrower ones instead of giving wrong weights.

    Experts are named by one pattern: vLLM asks for `experts.0.gate_proj` whatever the checkpoint calls it, and
    `transformers` takes the group whose pattern mentions experts for all of them.

    Args:
        formats: format and input features of each quantized layer, by module name.
        dense: module names of all other linear layers and routers.
        experts: which of all these are layers of experts; those in `formats` have the same bits and size of groups.
    """
    widest = max((d_in for name, (_, d_in) in formats.items() if name in experts), default=0)
    schemes: dict[tuple[int, int] | BlockType, list[str]] = {}
    for name, (form, d_in) in formats.items():
        schemes.setdefault(_key(form, widest if name in experts else d_in), []).append(name)
    groups = [{"targets": _patterned(targets, experts), **_scheme(key)} for key, targets in schemes.items()]
    groups.sort(key=lambda group: (-group["weights"]["num_bits"], group["weights"]["group_size"] or 0))
    kinds = {group["format"] for group in groups}
    return {
        "quant_method": QUANT_METHOD,
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": _patterned(dense, experts),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _routers(model: PreTrainedModel, block: str) -> list[str]:
    """Return the names of the modules of a block that choose experts."""
    return [
        f"{block}.{name}"
        for name, part in model.get_submodule(block).named_children()
        if "weight" in part._parameters and not isinstance(part, nn.Linear)
    ]


def _patterned(names: Sequence[str], experts: Collection[str]) -> list[str]:
    """Return the names, with those of experts replaced by the pattern."""
    others = [name for name in names if name not in experts]
    return others if len(others) == len(names) else [*others, _EXPERTS]


def _key(form: CodeFormat | BlockType, d_in: int) -> tuple[int, int] | BlockType:
    """Return what layers of one group have in common."""
    if isinstance(form, str):
        return form
    return form.bits, -1 if form.group_size >= d_in else form.group_size


def _scheme(key: tuple[int, int] | BlockType) -> dict[str, Any]:
    if isinstance(key, str):
        return block_tensors.scheme(key)
    bits, group = key
    return {
        "weights": {
            "num_bits": bits,
            "type": "int",
            "symmetric": True,
            "strategy": "channel" if group == -1 else "group",
            "group_size": None if group == -1 else group,
            "dynamic": False,
        },
        "input_activations": None,
        "output_activations": None,
        "format": _FORMAT,
    }


def _packed(rounded: RoundedWeight) -> Int32[Tensor, "d_out words"]:
    bits = rounded.scales.format.bits
    levels = (rounded.codes.T.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8).contiguous()
    if bits == 4:
        levels = levels[:, 0::2] | (levels[:, 1::2] << 4)
    words: Tensor = levels.contiguous().view(torch.int32)
    return words


def _scales(rounded: RoundedWeight, dtype: torch.dtype) -> Float[Tensor, "d_out groups"]:
    exact = rounded.scales.values(torch.float32).T
    stored = exact.to(dtype)
    assert torch.equal(stored.float(), exact), "scales were rounded to what both 16-bit dtypes represent"
    return stored
