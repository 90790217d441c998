"""Quantize a model with llm-compressor's GPTQ; run by `benchmarks.rivals` in an environment with that library.

    python llmcompressor_gptq.py MODEL WINDOWS BITS GROUP_SIZE OUT [PART]

Layers with PART in their names get 8 bits.
OUT/packed is the compressed model as the library saves it, OUT/dense has the same weights decompressed by the library.
The last line of output is the processor time from the start to the saved model.
Scales are found by squared error (observer `mse`); activation order is static and damping 0.01, which are the library's
defaults. The library needs groups that divide the inputs, so that other layers have one scale per output.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def quantization(targets: list[str], bits: int, group_size: int | None) -> QuantizationScheme:
    """Return the scheme of some layers; a group size of None is one scale per output."""
    grouping = {"strategy": "channel"} if group_size is None else {"strategy": "group", "group_size": group_size}
    weights = QuantizationArgs(num_bits=bits, type="int", symmetric=True, observer="mse", **grouping)
    return QuantizationScheme(targets=targets, weights=weights)


def main() -> None:
    """Quantize, save, load again and save the dense weights."""
    folder, windows, bits, group_size, out, *parts = sys.argv[1:]
    torch.manual_seed(0)
    kind = json.loads(Path(folder, "config.json").read_text())["model_type"]
    decoder = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind != "bert"
    auto = AutoModelForCausalLM if decoder else AutoModel
    # A processor without instructions for products of 16 bits takes far longer with them than in float32.
    has_products = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    model = auto.from_pretrained(folder, dtype="auto" if has_products else torch.float32)
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and any(part.isdigit() for part in name.split("."))
    }
    members = defaultdict(list)
    for name, layer in layers.items():
        layer_bits = 8 if any(part in name for part in parts) else int(bits)
        members[layer_bits, layer.in_features % int(group_size) == 0].append(name)
    groups = {
        f"group_{index}": quantization(names, layer_bits, int(group_size) if is_divisible else None)
        for index, ((layer_bits, is_divisible), names) in enumerate(sorted(members.items(), reverse=True))
    }
    ids = json.loads(Path(windows).read_text())
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})
    oneshot(
        model=model,
        dataset=data,
        recipe=GPTQModifier(config_groups=groups),
        num_calibration_samples=len(ids),
        max_seq_length=len(ids[0]),
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(Path(out, "packed"), save_compressed=True)
    took = os.times()
    loaded = auto.from_pretrained(
        Path(out, "packed"), quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    with torch.no_grad():
        loaded(torch.tensor(ids[:1]))
    dense = auto.from_pretrained(folder)
    weights = {name: module.weight for name, module in loaded.named_modules() if name in layers}
    for name, module in dense.named_modules():
        if name in layers:
            module.weight.data.copy_(weights[name])
    dense.save_pretrained(Path(out, "dense"))
    AutoTokenizer.from_pretrained(folder).save_pretrained(Path(out, "dense"))
    seconds = took.user + took.system
    print(json.dumps({"seconds": seconds, "system": took.system / seconds}))


if __name__ == "__main__":
    main()
