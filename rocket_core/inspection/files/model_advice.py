"""Advice on a model that is not a folder of a transformers checkpoint: what it is instead, and what to give."""

import difflib
import os
import re
from collections.abc import Collection
from pathlib import Path

from rocket_core.inspection.files.model_files import CONFIG_NAME

_PYTORCH_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth")
# Entries of a folder that are compared with a misspelled name.
_MOST_ENTRIES = 1000


WEIGHT_SUFFIXES = frozenset({".gguf", ".safetensors", *_PYTORCH_SUFFIXES})
"""Suffixes of files that people take for models."""


def is_gguf_file(path: Path) -> bool:
    """Return whether a path is a file that a compression turns into a checkpoint."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def advice_on_version(written: object, installed: str) -> str:
    """Return what to do if a config.json was written by a later transformers than the installed one."""
    of_file, of_package = (
        [int(part) for part in re.findall(r"\d{1,6}", str(version))[:2]] for version in (written, installed)
    )
    if of_file <= of_package:
        return ""
    return f"It was written by transformers {str(written)[:100]!r}, and {installed} is installed: upgrade it. "


def advice_on_contents(names: Collection[str]) -> str:
    """Return what files without a config.json are, and what to give instead.

    Args:
        names: names of the files.
    """
    suffixes = {Path(name).suffix.lower() for name in names}
    if ".gguf" in suffixes:
        return (
            "it holds GGUF files, whose weights are already quantized; give the original transformers checkpoint, "
            "and `--for llama.cpp` to get a GGUF file. Without the original, `rocket compress FILE.gguf OUT` reads one"
        )
    if ".safetensors" in suffixes:
        return "it holds weights alone; add the config.json and the tokenizer of the model that they belong to"
    if not suffixes.isdisjoint(_PYTORCH_SUFFIXES):
        return (
            "it holds PyTorch files; load the model with transformers and save it with save_pretrained(), which writes "
            "config.json and safetensors"
        )
    return "give a transformers checkpoint"


def advice_on_folder(folder: Path) -> str:
    """Return what a folder without config.json is, and what to give instead, such as a checkpoint in it."""
    entries = _entries(folder)
    inner = [entry for entry in entries if (entry / CONFIG_NAME).is_file()]
    if inner:
        return f"did you mean {inner[0]}?"
    return advice_on_contents([entry.name for entry in entries])


def advice_on_path(path: Path) -> str | None:
    """Return what to give instead of a path that is not a folder, or None if it resembles nothing that exists."""
    if path.is_file():
        if (path.parent / CONFIG_NAME).is_file():
            return f"it is a file; give its folder, {path.parent}"
        return f"it is a file; {advice_on_contents([path.name])}"
    near = _nearest(path)
    return None if near is None else f"did you mean {near}?"


def _nearest(path: Path) -> Path | None:
    """Return the existing folder whose path differs least from a missing one; only one name in it may differ."""
    missing = path
    while missing.parent != missing and not missing.parent.is_dir():
        missing = missing.parent
    rest = path.relative_to(missing)
    candidates = {entry.name: entry / rest for entry in _entries(missing.parent) if (entry / rest).is_dir()}
    close = difflib.get_close_matches(missing.name, candidates, n=1, cutoff=0.75)
    return candidates[close[0]] if close else None


def _entries(folder: Path) -> list[Path]:
    """Return the first entries of a folder, sorted; none if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(folder / entry.name for entry, _ in zip(entries, range(_MOST_ENTRIES), strict=False))
    except OSError:
        return []
