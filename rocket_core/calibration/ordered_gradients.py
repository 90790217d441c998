"""Gradients through fused attention, which GPUs add up in whatever order threads arrive unless told not to."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

_ORDERED = [kernel for name, kernel in SDPBackend.__members__.items() if name not in {"CUDNN_ATTENTION", "ERROR"}]


@contextmanager
def ordered_gradients() -> Iterator[None]:
    """Let attention that is called and differentiated within the block add up in one order, so that runs are equal.

    torch has a mode in which its own kernels do. It is on for their backward passes alone, because other operations
    without such a kernel fail in it. cuDNN's attention, which torch prefers on an H200, has no such order in torch
    (pytorch/pytorch#182551), and is not used.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    def restore() -> None:
        mode, warns = before
        torch.use_deterministic_algorithms(mode, warn_only=warns)

    try:
        with sdpa_kernel(_ORDERED), _OrderedAttention(restore):
            yield
    finally:
        # A backward pass that failed has not restored it.
        restore()


class _OrderedAttention(TorchFunctionMode):
    """Switches the mode on before each backward pass of attention, and off after it."""

    def __init__(self, restore: Callable[[], None]) -> None:
        super().__init__()
        self._restore = restore

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is scaled_dot_product_attention and output.grad_fn is not None:
            output.grad_fn.register_prehook(lambda _gradients: torch.use_deterministic_algorithms(mode=True))
            output.grad_fn.register_hook(lambda _inputs, _outputs: self._restore())
        return output
