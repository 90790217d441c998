"""A copy of a model in float16, so that fractions of its bytes are fractions of 16 bits per weight."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file


def copy_in_half_precision(model: Path, copy: Path) -> Path:
    """Write a copy of a model folder with all weights in float16.

    Args:
        model: folder with safetensors files.
        copy: a new folder.

    Returns:
        The copy.
    """
    copy.mkdir(parents=True)
    for file in sorted(model.iterdir()):
        if file.is_file() and file.suffix not in {".safetensors", ".bin"}:
            shutil.copyfile(file, copy / file.name)
    for file in sorted(model.glob("*.safetensors")):
        halves = {
            name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in load_file(file).items()
        }
        save_file(halves, copy / file.name, metadata={"format": "pt"})
    config = json.loads((copy / "config.json").read_text())
    config.pop("torch_dtype", None)
    (copy / "config.json").write_text(json.dumps(config | {"dtype": "float16"}, indent=1))
    return copy
