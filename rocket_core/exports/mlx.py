"""Quantized layers as MLX stores them, read by mlx-lm.

A layer L has the tensors

- `L.weight`: codes of an output as one run of bits in words of 32, the lowest bits of the first input first,
- `L.scales` and `L.biases`: for each output and group what a code is multiplied by, and what is added.

References:
    MLX, `mlx/ops.cpp` (`affine_quantize`). mlx-lm, `utils.py` (`load_model`): a layer without scales is dense, and bits
    and size of groups of others are looked up by name.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rocket_core.checkpoint import TensorPlan, plan_tensor
from rocket_core.errors import CheckpointFormatError
from rocket_core.exports.gguf_blocks import unpack_blocks
from rocket_core.sizes.block_types import BLOCK_FORMATS, MLX_TYPES, BlockType

_WORD_BYTES = 4
_HALF_BYTES = 2
# MLX's defaults. mlx-lm takes what is here for layers that are not named; all are.
_USUAL = {"group_size": 64, "bits": 4}


def part_shapes(shape: tuple[int, int], block_type: BlockType) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each tensor of a layer, by the end of its name.

    Args:
        shape: `(d_in, d_out)` of the layer.
        block_type: bits and size of groups.
    """
    d_in, d_out = shape
    block_format = BLOCK_FORMATS[block_type]
    groups = d_in // block_format.group_size
    words = (block_format.row_bytes(d_in) - 2 * _HALF_BYTES * groups) // _WORD_BYTES
    halves = (torch.bfloat16, (d_out, groups))
    return {"weight": (torch.uint32, (d_out, words)), "scales": halves, "biases": halves}


def plan_layer(
    base: str, shape: tuple[int, int], block_type: BlockType, read: Callable[[], Tensor]
) -> Iterator[TensorPlan]:
    """Plan the tensors of a layer.

    Args:
        base: their names up to `weight`.
        shape: `(d_in, d_out)` of the layer.
        block_type: bits and size of groups.
        read: returns the rows as `pack_blocks` does; called for each tensor when it is written.
    """
    block_bytes = BLOCK_FORMATS[block_type].block_bytes
    places = {"weight": slice(2 * _HALF_BYTES, None), "scales": slice(_HALF_BYTES), "biases": slice(_HALF_BYTES, 4)}

    def maker(part: slice, dtype: torch.dtype) -> Callable[[], Tensor]:
        return lambda: read().view(shape[1], -1, block_bytes)[:, :, part].flatten(1).contiguous().view(dtype)

    for part, (dtype, stored) in part_shapes(shape, block_type).items():
        yield plan_tensor(base + part, dtype, stored, maker(places[part], dtype))


def model_settings(types: Mapping[str, BlockType]) -> dict[str, Any]:
    """Return what `config.json` says of quantized layers, given their block types by name; nothing if all are dense."""
    if not types:
        return {}
    formats = {name: _described(block_type) for name, block_type in types.items()}
    quantization = {**_USUAL, "mode": "affine", **formats}
    return {"quantization": quantization, "quantization_config": quantization}


def dense_weights(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint for MLX with the weights that its codes stand for, in float32.

    Args:
        settings: `quantization` of its config.json.
        tensors: its tensors.

    Raises:
        CheckpointFormatError: a layer has other codes, or lacks its offsets.
    """
    dense = {key: tensor for key, tensor in tensors.items() if key.rpartition(".")[2] not in ("scales", "biases")}
    for key in tensors:
        layer, _, part = key.rpartition(".")
        if part != "scales":
            continue
        # mlx-lm's recipes of mixed bits write null for MLX's default.
        given = {**settings, **settings.get(layer, {})}
        described = {name: _USUAL.get(name) if value is None else value for name, value in given.items()}
        name = f"affine{described.get('bits')}_{described.get('group_size')}"
        block_type = next((known for known in MLX_TYPES if known == name), None)
        if block_type is None or f"{layer}.biases" not in tensors:
            raise CheckpointFormatError(
                f"layer {layer} is stored for MLX in a way that Rocket does not read; it reads 2, 3, 4, 5, 6 and 8 "
                "bits in groups of 32, 64 or 128, in mode affine"
            )
        scales, biases = tensors[key], tensors[f"{layer}.biases"]
        parts = [
            tensor.to(dtype).contiguous().view(torch.uint8).view(*scales.shape, -1)
            for tensor, dtype in (
                (scales, torch.bfloat16),
                (biases, torch.bfloat16),
                (tensors[f"{layer}.weight"], torch.uint32),
            )
        ]
        dense[f"{layer}.weight"] = unpack_blocks(torch.cat(parts, dim=2).flatten(1), block_type).rows(torch.float32)
    return dense


def _described(block_type: BlockType) -> dict[str, int]:
    block_format = BLOCK_FORMATS[block_type]
    bits = (len(block_format.levels) - 1).bit_length()
    return {"group_size": block_format.group_size, "bits": bits}
