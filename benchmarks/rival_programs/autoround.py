"""Quantize a model with AutoRound; run by `benchmarks.rivals` in an environment with that library.

    python autoround.py MODEL WINDOWS BITS GROUP_SIZE OUT

OUT/packed is the compressed model as the library saves it, OUT/dense has its weights after rounding in float32. All
settings but bits, group size and calibration data are the library's defaults: 200 steps of SignSGD per block, symmetric
integers. The library leaves layers alone whose inputs or outputs are not a multiple of 32.
"""

import json
import sys
from pathlib import Path

import torch
from auto_round import AutoRound
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def main() -> None:
    """Quantize and save in both forms."""
    folder, windows, bits, group_size, out = sys.argv[1:]
    kind = json.loads(Path(folder, "config.json").read_text())["model_type"]
    decoder = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind != "bert"
    auto = AutoModelForCausalLM if decoder else AutoModel
    ids = json.loads(Path(windows).read_text())
    rounding = AutoRound(
        auto.from_pretrained(folder),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        scheme=f"W{bits}A16",
        group_size=int(group_size),
        dataset=[torch.tensor([row]) for row in ids],
        seqlen=len(ids[0]),
        nsamples=len(ids),
        device_map="cpu",
    )
    # Rounded, and not packed yet.
    model, _ = rounding.quantize()
    rounded = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    rounding.save_quantized(str(Path(out, "packed")), format="auto_round", inplace=False)
    dense = auto.from_pretrained(folder, dtype=torch.float32)
    dense.load_state_dict({name: rounded[name] for name in dense.state_dict()})
    dense.save_pretrained(Path(out, "dense"))
    AutoTokenizer.from_pretrained(folder).save_pretrained(Path(out, "dense"))


if __name__ == "__main__":
    main()
