"""How a model calls one of its blocks, as recorded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCall:
    """The arguments that the model calls a block with, apart from the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def replace_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a call, or of a part of its arguments, with `change` applied to every tensor."""
    if isinstance(value, BlockCall):
        return BlockCall(args=replace_tensors(value.args, change), kwargs=replace_tensors(value.kwargs, change))
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(replace_tensors(item, change) for item in value)
    return {key: replace_tensors(item, change) for key, item in value.items()} if isinstance(value, dict) else value


def without_caches(call: BlockCall) -> BlockCall:
    """Return a call without a cache of keys and values, which would remember each time that the block is run.

    Not all models that create one can be told not to; see `block_calls.without_cache`.
    """
    args = tuple(None if isinstance(value, Cache) else value for value in call.args)
    kwargs = {name: None if isinstance(value, Cache) else value for name, value in call.kwargs.items()}
    return BlockCall(args=args, kwargs=kwargs)


def reuse_equal(new: Any, old: Any) -> Any:
    """Return `new`, with equal parts taken from `old`, so that values common to all batches are in memory only once."""
    if isinstance(new, BlockCall):
        return BlockCall(args=reuse_equal(new.args, old.args), kwargs=reuse_equal(new.kwargs, old.kwargs))
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        if new.requires_grad:
            return new  # Its autograd graph belongs to its own batch.
        same = new is old or (new.shape == old.shape and new.dtype == old.dtype and torch.equal(new, old))
        return old if same else new
    if isinstance(new, tuple) and isinstance(old, tuple) and len(new) == len(old):
        return tuple(reuse_equal(*pair) for pair in zip(new, old, strict=True))
    if isinstance(new, dict) and isinstance(old, dict) and new.keys() == old.keys():
        return {key: reuse_equal(value, old[key]) for key, value in new.items()}
    return new


def to_float32(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 if it has floating-point numbers."""
    return tensor.float() if tensor.is_floating_point() else tensor
