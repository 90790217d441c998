"""Quantized layers as Microsoft Olive stores them, read by the model builder of ONNX Runtime GenAI.

A layer L has the tensors

- `L.qweight`: codes + 2^(bits - 1) of an output in bytes, the first input in the lowest bits,
- `L.scales`: a scale for each output and group, in the model's dtype.

Without zero points, the code of the value 0 is 2^(bits - 1). The operator `MatMulNBits` has the same bytes.

References:
    onnxruntime-genai 0.18, `models/loaders/olive.py` and `models/loaders/base.py`: each linear layer of a block has
    codes. ONNX Runtime, `docs/ContribOperators.md` (`com.microsoft.MatMulNBits`).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rocket_core.checkpoint import TensorPlan, plan_tensor
from rocket_core.errors import CheckpointFormatError
from rocket_core.layers.packing import pack_integers, unpack_integers
from rocket_core.linalg.integer_codes import RoundedWeight
from rocket_core.sizes.code_format import CodeFormat

QUANT_METHOD = "olive"
"""Value of `quant_method` in `config.json`."""

_BYTE = 8
_WIDTHS = (2, 4, 8)
# What the builder takes for layers that are not named; all are.
_USUAL = {"bits": 4, "group_size": 32}


def part_shapes(
    shape: tuple[int, int], code_format: CodeFormat, dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each tensor of a layer, by the end of its name.

    Args:
        shape: `(d_in, d_out)` of the layer.
        code_format: bits and groups; the codes of an output fill whole bytes.
        dtype: dtype of the model.
    """
    d_in, d_out = shape
    return {
        "qweight": (torch.uint8, (d_out, d_in * code_format.bits // _BYTE)),
        "scales": (dtype, (d_out, code_format.groups(d_in))),
    }


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
    makers: dict[str, Callable[[], Tensor]] = {
        "qweight": lambda: _packed(read()),
        "scales": lambda: read().scales.values(torch.float32).T.to(dtype).contiguous(),
    }
    for part, stored in part_shapes(shape, code_format, dtype).items():
        yield plan_tensor(base + part, *stored, makers[part])


def quantization_config(formats: Mapping[str, CodeFormat]) -> dict[str, Any]:
    """Return the `quantization_config` of `config.json`, given the format of each quantized layer by its name."""
    own = {name: {"bits": form.bits, "group_size": form.group_size} for name, form in formats.items()}
    return {"quant_method": QUANT_METHOD, **_USUAL, "symmetric": True, "overrides": own}


def dense_weights(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint with the weights that its codes stand for, in float32.

    Args:
        settings: `quantization_config` of its config.json.
        tensors: its tensors.

    Raises:
        CheckpointFormatError: a layer has zero points, or codes of another width.
    """
    dense = {key: tensor for key, tensor in tensors.items() if key.rpartition(".")[2] not in ("qweight", "scales")}
    for key, packed in tensors.items():
        layer, _, part = key.rpartition(".")
        if part != "qweight":
            continue
        bits = {**settings, **settings.get("overrides", {}).get(layer, {})}.get("bits")
        scales = tensors.get(f"{layer}.scales")
        if bits not in _WIDTHS or scales is None or f"{layer}.qzeros" in tensors:
            raise CheckpointFormatError(
                f"layer {layer} is stored for Olive in a way that Rocket does not read; it reads 2, 4 and 8 bits "
                "without zero points"
            )
        rows, d_in = len(packed), packed.shape[1] * _BYTE // bits
        codes = unpack_integers(packed.flatten(), bits, rows * d_in).view(*scales.shape, -1)
        weight = (codes.float() - 2 ** (bits - 1)) * scales.float()[:, :, None]
        dense[f"{layer}.weight"] = weight.view(rows, d_in)
    return dense


def _packed(rounded: RoundedWeight) -> Tensor:
    bits = rounded.scales.format.bits
    levels = (rounded.codes.T.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
    return pack_integers(levels.flatten(), bits).view(len(levels), -1)
