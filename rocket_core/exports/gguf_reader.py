"""Weights of a GGUF file under their names in a checkpoint, for families whose files `transformers` does not read."""

from pathlib import Path

import torch
from torch import Tensor

from rocket_core.exports.gguf_model import GgufPlan
from rocket_core.exports.gguf_tensors import TensorRules


def read_weights(path: Path, plan: GgufPlan) -> dict[str, Tensor]:
    """Return the tensors of a file as a checkpoint has them, dequantized to float32 by the package `gguf`.

    Args:
        path: a file that was written by the plan.
        plan: what it contains.

    Raises:
        UnsupportedExportError: the file has a tensor that the plan does not.
    """
    from gguf import GGUFReader, dequantize

    found: dict[str, Tensor] = {}
    for stored in GGUFReader(path).tensors:
        values = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
        for key in plan.keys(stored.name):
            rules = plan.tensor(key)
            assert rules is not None, key
            found[key] = restored(values if rules.expert is None else values[rules.expert], rules)
    return found


def restored(tensor: Tensor, rules: TensorRules) -> Tensor:
    """Return a tensor in the order and shape of the checkpoint."""
    if rules.flat:
        return tensor.reshape(1, -1)
    order = rules.row_order(len(tensor))
    restored = tensor if order is None else tensor[torch.tensor(order).argsort()]
    return restored - rules.shift if rules.shift else restored
