"""Layers of block types as compressed-tensors stores them, read by vLLM and by `transformers`.

A layer L of INT8 (`int-quantized`) or FP8 (`float-quantized`) has the tensors

- `L.weight`: codes in int8 or E4M3,
- `L.weight_scale`: a scale for each output, in the model's dtype,

and one of NVFP4 (`nvfp4-pack-quantized`)

- `L.weight_packed`: E2M1 codes, the first of two inputs in the low half of a byte,
- `L.weight_scale`: a scale in E4M3 for each output and 16 inputs,
- `L.weight_global_scale`: what these scales are divided by.

References:
    compressed-tensors, `compressors/naive_quantized`, `compressors/nvfp4` and `quantization/quant_scheme.py` (the
    presets `INT8_W8A8`, `FP8_DYNAMIC` and `NVFP4A16`).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rocket_core.checkpoint import TensorPlan, plan_tensor
from rocket_core.sizes.block_types import BLOCK_FORMATS, NVFP4_SCALE, BlockType

_WEIGHTS: dict[BlockType, torch.dtype] = {"INT8": torch.int8, "FP8": torch.float8_e4m3fn}
_CODES = {"num_bits": 8, "type": "float", "symmetric": True}


def _with_inputs(kind: str) -> dict[str, Any]:
    codes = {**_CODES, "type": kind, "group_size": None}
    return {
        "weights": {**codes, "strategy": "channel", "dynamic": False},
        # vLLM finds the scale of each token when it computes.
        "input_activations": {**codes, "strategy": "token", "dynamic": True},
        "output_activations": None,
        "format": f"{kind}-quantized",
    }


_SCHEMES: dict[BlockType, dict[str, Any]] = {
    "INT8": _with_inputs("int"),
    "FP8": _with_inputs("float"),
    "NVFP4": {
        "weights": {
            **_CODES,
            "num_bits": 4,
            "strategy": "tensor_group",
            "group_size": BLOCK_FORMATS["NVFP4"].group_size,
            "dynamic": False,
            "scale_dtype": "torch.float8_e4m3fn",
        },
        "input_activations": None,
        "output_activations": None,
        "format": "nvfp4-pack-quantized",
    },
}


def scheme(block_type: BlockType) -> dict[str, Any]:
    """Return what `config.json` says of a group of layers, but for their names."""
    return _SCHEMES[block_type]


def part_shapes(
    shape: tuple[int, int], block_type: BlockType, dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each tensor of a layer, by the end of its name.

    Args:
        shape: `(d_in, d_out)` of the layer.
        block_type: the block type.
        dtype: dtype of the model.
    """
    d_in, d_out = shape
    if block_type in _WEIGHTS:
        return {"weight": (_WEIGHTS[block_type], (d_out, d_in)), "weight_scale": (dtype, (d_out, 1))}
    return {
        "weight_packed": (torch.uint8, (d_out, d_in // 2)),
        "weight_scale": (torch.float8_e4m3fn, (d_out, d_in // BLOCK_FORMATS[block_type].group_size)),
        "weight_global_scale": (torch.float32, (1,)),
    }


def plan_layer(
    base: str, shape: tuple[int, int], block_type: BlockType, dtype: torch.dtype, read: Callable[[], Tensor]
) -> Iterator[TensorPlan]:
    """Plan the tensors of a layer.

    Args:
        base: their names up to `weight`.
        shape: `(d_in, d_out)` of the layer.
        block_type: the block type.
        dtype: dtype of the model, in 16 bits.
        read: returns the rows as `pack_blocks` does; called for each tensor when it is written.
    """
    block_bytes = BLOCK_FORMATS[block_type].of_row(shape[0]).block_bytes

    def part(taken: slice) -> Tensor:
        return read().view(shape[1], -1, block_bytes)[:, :, taken].flatten(1).contiguous()

    makers: dict[str, Callable[[], Tensor]] = {
        "weight": lambda: part(slice(2, None)).view(_WEIGHTS[block_type]),
        "weight_scale": lambda: part(slice(2)).view(torch.bfloat16).to(dtype),
    }
    if block_type == "NVFP4":
        makers = {
            "weight_packed": lambda: part(slice(1, None)),
            "weight_scale": lambda: part(slice(1)).view(torch.float8_e4m3fn),
            "weight_global_scale": lambda: torch.tensor([1 / NVFP4_SCALE]),
        }
    for name, stored in part_shapes(shape, block_type, dtype).items():
        yield plan_tensor(base + name, *stored, makers[name])
