"""Checkpoints of coded weights whose config.json does not say so, by the scheme: as libraries write them."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from tests.reference.tiny_mixtures import save_tiny_mixture
from tests.reference.tiny_models import save_tiny_model

Tensors = dict[str, torch.Tensor]


def _fp8_of_transformers(weight: torch.Tensor) -> Tensors:
    settings = FineGrainedFP8Config(weight_block_size=(16, 16))
    made: Tensors = Fp8Quantize(SimpleNamespace(quantization_config=settings)).convert({"weight": weight})
    return made


def _fp8_of_modelopt(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().max() / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale, "input_scale": torch.tensor(0.1)}


def _nvfp4_of_modelopt(weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    return {
        "weight": torch.ones(rows, columns // 2, dtype=torch.uint8),
        "weight_scale": torch.ones(rows, columns // 16).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.01),
        "input_scale": torch.tensor(0.1),
    }


def _int8_of_bitsandbytes(weight: torch.Tensor) -> Tensors:
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    return {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}


def _nf4_of_bitsandbytes(weight: torch.Tensor) -> Tensors:
    return {
        "weight": torch.ones(weight.numel() // 2, 1, dtype=torch.uint8),
        "weight.absmax": torch.ones(weight.numel() // 64),
        "weight.quant_map": torch.ones(16),
        "weight.quant_state.bitsandbytes__nf4": torch.ones(80, dtype=torch.uint8),
    }


def _gptq(weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    packed = {
        "qweight": torch.ones(columns // 8, rows, dtype=torch.int32),
        "qzeros": torch.ones(1, rows // 8, dtype=torch.int32),
    }
    return packed | {"scales": torch.ones(1, rows).half(), "g_idx": torch.zeros(columns, dtype=torch.int32)}


def _awq(weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    packed = {
        "qweight": torch.ones(columns, rows // 8, dtype=torch.int32),
        "qzeros": torch.ones(1, rows // 8, dtype=torch.int32),
    }
    return packed | {"scales": torch.ones(1, rows).half()}


def _hqq(weight: torch.Tensor) -> Tensors:
    groups = weight.numel() // 64
    return {
        "W_q": torch.ones(groups // 2, 64, dtype=torch.uint8),
        "scale": torch.ones(1, groups),
        "zero": torch.ones(1, groups),
    }


_LAYERS: dict[str, Callable[[torch.Tensor], Tensors]] = {
    "FP8 with scales of blocks": _fp8_of_transformers,
    "FP8 with scales": _fp8_of_modelopt,
    "NVFP4": _nvfp4_of_modelopt,
    "int8 of bitsandbytes": _int8_of_bitsandbytes,
    "4-bit codes of bitsandbytes": _nf4_of_bitsandbytes,
    "packed by GPTQ": _gptq,
    "packed by AWQ": _awq,
    "packed by HQQ": _hqq,
    "without scales": lambda weight: {"weight": weight.to(torch.float8_e5m2)},
}
_PACKED: dict[str, dict[str, Any]] = {
    "packed by compressed-tensors": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16},
    "integers with scales": {"num_bits": 8, "type": "int", "strategy": "channel"},
}
_FORMATS = {4: "pack-quantized", 8: "int-quantized"}

SCHEMES = (*_LAYERS, *_PACKED, "MXFP4")
"""A part of the words for each scheme."""


def save_coded(scheme: str, folder: Path) -> Path:
    """Write a complete checkpoint whose layers in blocks are coded, with the config.json of a plain model."""
    if scheme == "MXFP4":
        return _save_gpt_oss(folder)
    save_tiny_model("llama", folder)
    if scheme in _PACKED:
        _write(folder, _compressed_tensors(folder, _PACKED[scheme]))
        return folder
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if ".layers." in key and tensors[key].ndim == 2]:
        parts = _LAYERS[scheme](tensors.pop(key))
        tensors |= {f"{key.removesuffix('weight')}{part}": value for part, value in parts.items()}
    _write(folder, tensors)
    return folder


def _compressed_tensors(folder: Path, codes: dict[str, Any]) -> Tensors:
    model = AutoModelForCausalLM.from_pretrained(folder)
    groups = {"all": {"targets": ["Linear"], "weights": codes}}
    settings = {"config_groups": groups, "ignore": ["lm_head"], "format": _FORMATS[codes["num_bits"]]}
    apply_quantization_config(model, QuantizationConfig.model_validate(settings))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data.fill_(0.1)
    compressor: Any = ModelCompressor.from_pretrained_model(model, quantization_format=settings["format"])
    compressor.compress_model(model)
    return dict(model.state_dict())


def _save_gpt_oss(folder: Path) -> Path:
    save_tiny_mixture("gpt_oss", folder)
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.endswith("_proj")]:
        experts, columns, rows = tensors.pop(key).shape
        tensors[f"{key}_blocks"] = torch.ones(experts, rows, columns // 32 + 1, 16, dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.ones(experts, rows, columns // 32 + 1, dtype=torch.uint8)
    _write(folder, tensors)
    return folder


def _write(folder: Path, tensors: Tensors) -> None:
    (folder / "model.safetensors").unlink()
    contiguous = {key: value.contiguous() for key, value in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
