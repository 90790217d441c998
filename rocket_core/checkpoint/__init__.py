"""Weights on disk: finding and checking a checkpoint, loading parts of it, writing safetensors without holding them.

`source` finds a model, `transfer` watches its download, `reader` checks its files, `loader` fills modules one at a
time, `writer` streams new files.
"""

from rocket_core.checkpoint.loader import WeightLoader
from rocket_core.checkpoint.reader import Checkpoint, TensorEntry, open_checkpoint
from rocket_core.checkpoint.source import ModelSource, find_model
from rocket_core.checkpoint.transfer import Transfer
from rocket_core.checkpoint.writer import (
    TensorPlan,
    header_bytes,
    plan_copy,
    plan_tensor,
    write_atomically,
    write_checkpoint,
    write_safetensors,
)

__all__ = [
    "Checkpoint",
    "ModelSource",
    "TensorEntry",
    "TensorPlan",
    "Transfer",
    "WeightLoader",
    "find_model",
    "header_bytes",
    "open_checkpoint",
    "plan_copy",
    "plan_tensor",
    "write_atomically",
    "write_checkpoint",
    "write_safetensors",
]
