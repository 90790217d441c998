"""Blocks that keep nothing but their input for the backward pass, and run again in it."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_blocks(blocks: Iterable[nn.Module]) -> None:
    """Make blocks compute their activations again in the backward pass, in place.

    Memory is then that of one block's activations and every block's input; a step takes about a third more time.
    Models are expected in evaluation mode, where blocks have no randomness.
    """
    for block in blocks:
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
