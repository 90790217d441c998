"""The layers of mixtures that choose experts for a token."""

from collections.abc import Iterator

from torch import nn

from rocket_core.experts import UnfusedExperts
from rocket_core.layers import is_stock_linear
from rocket_core.models.called_lists import is_called


def routing_layers(block: nn.Module, hidden_size: int) -> Iterator[nn.Module]:
    """Yield the linear layers next to a block's experts that belong to a module which returns no hidden states.

    They are small, and an error in them sends tokens to other experts, which their squared error does not show. The
    gate of a shared expert, which has one output, chooses none.

    Args:
        block: the block, whose experts are separate modules.
        hidden_size: width of the model's hidden states.
    """
    for name, experts in block.named_modules():
        if not isinstance(experts, nn.ModuleList | nn.ModuleDict) or not is_called(experts):
            continue
        widths = {hidden_size, experts.layout.hidden if isinstance(experts, UnfusedExperts) else hidden_size}
        for part in block.get_submodule(name.rpartition(".")[0]).children():
            layers = [module for module in part.modules() if is_stock_linear(module)]
            if part is not experts and not any(_outputs(layer) in {1, *widths} for layer in layers):
                yield from layers


def _outputs(layer: nn.Module) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else int(layer.get_parameter("weight").shape[1])
