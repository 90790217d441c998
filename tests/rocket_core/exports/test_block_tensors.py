"""The tensors of INT8, FP8 and NVFP4, against compressed-tensors' own compressors and torch's own dtypes."""

import pytest
import torch

from rocket_core.checkpoint.reader import DTYPES, SMALL_DTYPES
from rocket_core.exports.block_tensors import part_shapes, plan_layer
from rocket_core.exports.compressed_tensors import quantization_config
from rocket_core.exports.gguf_blocks import pack_blocks, unpack_blocks
from rocket_core.linalg.block_codes import BlockScales, BlockWeight, in_half
from rocket_core.linalg.block_scales import search_block_scales
from rocket_core.linalg.rounding import round_to_nearest
from rocket_core.sizes.block_types import BLOCK_FORMATS, VLLM_TYPES

SHAPE = (64, 24)
NAMES = {"INT8": "int-quantized", "FP8": "float-quantized", "NVFP4": "nvfp4-pack-quantized"}
all_types = pytest.mark.parametrize("name", VLLM_TYPES)
both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def any_weight(name, seed=0):
    """Return a weight with every level, and scales over most of their range."""
    draw, block_format = torch.Generator().manual_seed(seed), BLOCK_FORMATS[name].of_row(SHAPE[0])
    levels = torch.tensor(block_format.levels, dtype=torch.int32 if name == "FP8" else torch.int8)
    codes = levels[torch.randint(len(levels), SHAPE, generator=draw)]
    groups = SHAPE[0] // block_format.group_size
    scales = torch.exp2(torch.randn(groups, SHAPE[1], generator=draw) * 3 - 8) * block_format.unit * 128
    stored = BlockScales(
        block_scales=in_half(scales, block_format),
        group_scales=torch.ones(groups, SHAPE[1], dtype=torch.int8),
        block_minima=None,
        group_minima=None,
        format=block_format,
    )
    return BlockWeight(codes=codes, scales=stored)


def tensors_of(name, rounded, dtype):
    dtypes = DTYPES | SMALL_DTYPES
    plans = plan_layer("", SHAPE, name, dtype, lambda: pack_blocks(rounded))
    return {
        plan.key: torch.frombuffer(bytearray(b"".join(plan.chunks())), dtype=dtypes[plan.dtype]).view(plan.shape)
        for plan in plans
    }


def package(name):
    """Return the package's compressor for a format, and the scheme that we write."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    config = quantization_config({"layer": (name, SHAPE[0])}, [])
    assert config["format"] == NAMES[name]
    [group] = config["config_groups"].values()
    return BaseCompressor.get_value_from_registry(NAMES[name]), QuantizationScheme.model_validate(group)


@all_types
@both_dtypes
def test_its_decompressor_returns_our_reconstruction(name, dtype):
    rounded = any_weight(name)
    compressor, scheme = package(name)
    theirs = compressor.decompress(tensors_of(name, rounded, dtype), scheme)["weight"]
    # It decodes NVFP4 in bfloat16, which represents these weights as float16 does.
    assert theirs.dtype == (torch.bfloat16 if name == "NVFP4" else dtype)
    assert torch.equal(theirs.float(), rounded.rows(dtype).float())


@all_types
def test_its_compressor_writes_the_same_bytes(name):
    rounded = any_weight(name, seed=1)
    compressor, scheme = package(name)
    ours = tensors_of(name, rounded, torch.bfloat16)
    dense = {key: part.float() for key, part in ours.items() if "scale" in key}
    theirs = compressor.compress({"weight": rounded.rows(torch.float32), **dense}, scheme)
    key = "weight_packed" if name == "NVFP4" else "weight"
    ours, theirs = (tensors[key].view(torch.uint8).int() for tensors in (ours, theirs))
    # Zero may have a sign in floating-point codes.
    sign, low = {"INT8": (256, 255), "FP8": (128, 255), "NVFP4": (8, 15)}[name]
    for shift in (0, 4) if name == "NVFP4" else (0,):
        own, other = (tensor >> shift & low for tensor in (ours, theirs))
        assert torch.equal(own, torch.where(other == sign, 0, other))


@all_types
def test_tensors_have_the_shapes_and_bytes_that_are_counted(name):
    found = tensors_of(name, any_weight(name), torch.float16)
    shapes = {key: (part.dtype, tuple(part.shape)) for key, part in found.items()}
    assert shapes == part_shapes(SHAPE, name, torch.float16)
    counted = BLOCK_FORMATS[name].stored_bytes(*SHAPE) + (4 if name == "NVFP4" else 0)
    assert sum(part.nbytes for part in found.values()) == counted


@all_types
def test_reading_returns_what_was_written(name):
    rounded = any_weight(name)
    read = unpack_blocks(pack_blocks(rounded), name)
    assert torch.equal(read.codes, rounded.codes)
    assert torch.equal(read.weight(torch.float32), rounded.weight(torch.float32))


def test_levels_are_the_numbers_of_e4m3():
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = numbers[numbers.isfinite()].unique()
    fp8 = BLOCK_FORMATS["FP8"]
    assert torch.equal(torch.tensor(fp8.levels) * fp8.unit, finite)


@all_types
def test_weights_of_any_magnitude_stay_finite(name):
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    weight[:, :4] = torch.tensor([0.0, 1e-12, 1e9, -1e9])
    found = round_to_nearest(weight, search_block_scales(weight, torch.ones(len(weight)), BLOCK_FORMATS[name]))
    rows = found.weight(torch.float32)
    assert bool(rows.isfinite().all())
    assert bool((rows[:, 0] == 0).all())
    # Larger weights than can be stored become the largest.
    assert float(rows[0, 2]) == -float(rows[0, 3]) > 5
    assert float((rows - weight)[:, 4:].norm() / weight[:, 4:].norm()) < {"INT8": 0.01, "FP8": 0.03, "NVFP4": 0.1}[name]


def test_scales_that_can_be_stored_are_positive():
    for name in VLLM_TYPES:
        scales = in_half(torch.tensor([0.0, -1.0, 1e9, 1e-30]), BLOCK_FORMATS[name]).float()
        assert bool((scales > 0).all())
        assert bool(scales.half().isfinite().all())
        assert torch.equal(scales.half().float(), scales)


def test_a_file_may_have_both():
    config = quantization_config({"a": ("NVFP4", 64), "b": ("FP8", 64), "c": ("NVFP4", 32)}, ["lm_head"])
    assert config["format"] == "mixed-precision"
    groups = [(group["targets"], group["format"]) for group in config["config_groups"].values()]
    assert groups == [(["b"], NAMES["FP8"]), (["a", "c"], NAMES["NVFP4"])]
