"""Tiny checkpoints whose weights are stored in few bits and described in config.json, as libraries write them."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FineGrainedFP8Config,
    GptOssConfig,
    GptOssForCausalLM,
)
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from tests.reference.tiny_mixtures import MIXTURES, save_tiny_mixture
from tests.reference.tiny_models import byte_tokenizer, save_tiny_model

Tensors = dict[str, torch.Tensor]

BLOCK = (8, 8)
"""Rows and columns that share a scale in FP8; whole blocks, as transformers decodes no others."""

_GROUPS: dict[str, dict[str, Any]] = {
    "pack-quantized": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True},
    "pack-quantized, asymmetric": {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 16,
        "symmetric": False,
    },
    "pack-quantized, 8 bits": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "int-quantized": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    "float-quantized, tensor": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
    "float-quantized, block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 16]},
    "nvfp4-pack-quantized": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
    },
    "mxfp4-pack-quantized": {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": "torch.uint8",
    },
}
COMPRESSED = tuple(_GROUPS)
"""Formats of compressed-tensors."""


def save_few_bits(scheme: str, folder: Path) -> Path:
    """Write a complete checkpoint: `deepseek_v3`, `fp8 FAMILY`, `mxfp4`, or one of `COMPRESSED`."""
    if scheme == "deepseek_v3":
        return _save_deepseek_v3(folder)
    if scheme.startswith("fp8 "):
        return save_fp8(scheme.removeprefix("fp8 "), folder)
    return _save_gpt_oss(folder) if scheme == "mxfp4" else _save_compressed(scheme, folder)


def describe(folder: Path, **fields: Any) -> None:
    """Change fields of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def replace_layers(folder: Path, code: Callable[[torch.Tensor], Tensors]) -> None:
    """Replace the linear layers of all blocks, but no router, by tensors named from `.` or `.weight` on."""
    tensors = {key: value.bfloat16() for key, value in load_file(folder / "model.safetensors").items()}
    for key in [key for key in tensors if ".layers." in key and key.endswith("_proj.weight")]:
        stem = key.removesuffix("weight")
        tensors |= {f"{stem}{part}": value.contiguous() for part, value in code(tensors.pop(key)).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    describe(folder, dtype="bfloat16")


def save_fp8(family: str, folder: Path, block: tuple[int, int] = BLOCK) -> Path:
    """Write a checkpoint in FP8 with a scale for each block, as DeepSeek does: the last ones may be incomplete."""
    (save_tiny_mixture if family in MIXTURES else save_tiny_model)(family, folder)
    return code_fp8(folder, block)


def code_fp8(folder: Path, block: tuple[int, int] = BLOCK) -> Path:
    """Store the layers of a checkpoint in FP8 instead."""
    settings = FineGrainedFP8Config(weight_block_size=block)
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=settings))

    def code(weight: torch.Tensor) -> Tensors:
        rows, columns = weight.shape
        whole = pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
        made: Tensors = quantize.convert({"weight": whole})
        return made | {"weight": made["weight"][:rows, :columns]}

    replace_layers(folder, code)
    described = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
    describe(folder, quantization_config=described)
    return folder


def _save_deepseek_v3(folder: Path) -> Path:
    """Write a checkpoint with all that those of DeepSeek have, the block that predicts a second token included."""
    config = MIXTURES["deepseek_v3"]().config.to_dict()
    sizes = {"hidden_size": 160, "intermediate_size": 272, "moe_intermediate_size": 144, "kv_lora_rank": 32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**config | sizes))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    code_fp8(folder, (128, 128))
    file, last = folder / "model.safetensors", f"model.layers.{config['num_hidden_layers'] - 1}."
    tensors = load_file(file)
    following = f"model.layers.{config['num_hidden_layers']}."
    tensors |= {key.replace(last, following): value for key, value in tensors.items() if key.startswith(last)}
    shared = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head", "shared_head.norm": "model.norm"}
    tensors |= {f"{following}{key}.weight": tensors[f"{name}.weight"].clone() for key, name in shared.items()}
    norms = {f"{following}{key}.weight": torch.ones(160, dtype=torch.bfloat16) for key in ("enorm", "hnorm")}
    tensors |= {**norms, f"{following}eh_proj.weight": torch.zeros(160, 320, dtype=torch.bfloat16)}
    save_file({key: value.clone() for key, value in tensors.items()}, file, metadata={"format": "pt"})
    describe(folder, num_nextn_predict_layers=1)
    return folder


def _save_gpt_oss(folder: Path) -> Path:
    fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 320, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64}
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GptOssForCausalLM(GptOssConfig(**fields, **heads, **tokens, sliding_window=16, initializer_range=0.2))
        model.to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.endswith("_proj")]:
        experts, columns, rows = tensors.pop(key).shape
        shape = experts, rows, columns // 32
        tensors[f"{key}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator).byte()
        tensors[f"{key}_scales"] = torch.randint(122, 125, shape, generator=generator).byte()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    described = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
    describe(folder, quantization_config=described, dtype="bfloat16")
    return folder


def _save_compressed(scheme: str, folder: Path) -> Path:
    save_tiny_model("llama", folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    # The inputs of the others are not a multiple of a group.
    targets = [r"re:.*\.(q_proj|up_proj)$"] if _GROUPS[scheme].get("group_size") == 32 else ["Linear"]
    groups = {"all": {"targets": targets, "weights": _GROUPS[scheme]}}
    form = scheme.partition(",")[0]
    settings = {"config_groups": groups, "ignore": ["lm_head"], "format": form, "quantization_status": "compressed"}
    apply_quantization_config(model, QuantizationConfig.model_validate(settings | {"quantization_status": "frozen"}))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            _set_scales(module, _GROUPS[scheme])
    compressor: Any = ModelCompressor.from_pretrained_model(model, quantization_format=form)
    compressor.compress_model(model)
    tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    describe(folder, dtype="bfloat16", quantization_config={"quant_method": "compressed-tensors", **settings})
    return folder


def _set_scales(module: torch.nn.Module, codes: dict[str, Any]) -> None:
    """Set scales that differ: of every group, or where there is only one."""
    scale: Any = module.weight_scale
    largest = float(module.weight.detach().abs().max())
    most = {("int", 4): 7, ("int", 8): 127, ("float", 8): 448, ("float", 4): 6}[codes["type"], codes["num_bits"]]
    with torch.no_grad():
        powers = torch.arange(scale.numel()).remainder(3).float().sub(1).exp2().reshape(scale.shape)
        base = 1.0 if hasattr(module, "weight_global_scale") else largest / most
        scale.copy_(torch.exp2(torch.log2(powers * base).round()) if codes.get("group_size") == 32 else powers * base)
        if hasattr(module, "weight_global_scale"):
            module.weight_global_scale.copy_(torch.tensor(most / largest))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.copy_(torch.arange(scale.numel()).remainder(5).sub(2).reshape(scale.shape))
