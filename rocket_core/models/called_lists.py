"""Module lists that are called themselves, as some mixtures store their experts: each module reads some of the rows.

Switch Transformers and NLLB-MoE do so: the list is called with the states of all tokens, and where each is routed.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

_Call = tuple[tuple[Any, ...], dict[str, Any]]


def is_called(module: nn.Module) -> bool:
    """Return whether a module can be called; `nn.ModuleList` and `nn.ModuleDict` cannot, their subclasses may."""
    return type(module).forward is not nn.Module.forward


def called_list_of(block: nn.Module, layer: nn.Module) -> str | None:
    """Return the name within a block of the innermost called list that contains a layer; None where no list does."""
    found = [
        name
        for name, part in block.named_modules()
        if isinstance(part, nn.ModuleList | nn.ModuleDict)
        and is_called(part)
        and any(layer is module for module in part.modules())
    ]
    return max(found, key=len, default=None)


@contextmanager
def following_calls(leader: nn.Module, follower: nn.Module) -> Iterator[None]:
    """While active, call a list with the arguments of another's last call, but for the first, which are the states.

    So both send the same tokens to each of their modules.

    Args:
        leader: the list whose arguments are taken; always called before the other.
        follower: the list that gets them.
    """
    last: list[_Call] = []

    def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        last[:] = [(args, kwargs)]

    def replace(_module: nn.Module, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> _Call:
        (leading, named) = last[0]
        return (*args[:1], *leading[1:]), named

    with ExitStack() as stack:
        for module, hook in ((leader, note), (follower, replace)):
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield
