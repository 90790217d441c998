"""Weights on disk: finding and checking a checkpoint, loading parts of it, writing safetensors as a stream.

`source` finds a model, `download` and `transfer` monitor its download, `reader` checks its files, `loader` fills
modules one at a time, `writer` streams new files. Names are imported on first use, because a process that only
downloads does not need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rocket_core.checkpoint.loader import WeightLoader
    from rocket_core.checkpoint.reader import Checkpoint, PartEntry, TensorEntry, open_checkpoint
    from rocket_core.checkpoint.source import ModelSource, find_model
    from rocket_core.checkpoint.transfer import Transfer
    from rocket_core.checkpoint.writer import (
        TensorPlan,
        checkpoint_bytes,
        plan_copy,
        plan_tensor,
        write_checkpoint,
        write_safetensors,
    )

__all__ = [
    "Checkpoint",
    "ModelSource",
    "PartEntry",
    "TensorEntry",
    "TensorPlan",
    "Transfer",
    "WeightLoader",
    "checkpoint_bytes",
    "find_model",
    "open_checkpoint",
    "plan_copy",
    "plan_tensor",
    "write_checkpoint",
    "write_safetensors",
]

# All but the first load torch.
_MODULES = ("source", "reader", "writer", "loader")


def __getattr__(name: str) -> object:
    if name in __all__:
        modules = (import_module(f"{__name__}.{module}") for module in _MODULES)
        return next(getattr(module, name) for module in modules if hasattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
