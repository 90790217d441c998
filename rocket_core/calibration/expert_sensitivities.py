"""Sensitivities of experts, which few or none of the tokens of a text may have been routed to."""

from collections import defaultdict
from collections.abc import Collection, Mapping

from jaxtyping import Float
from torch import Tensor

from rocket_core.experts import is_expert_name


def with_another_token(
    diagonals: Mapping[str, Float[Tensor, " d_out"]], modules: Collection[str], tokens: int
) -> dict[str, Float[Tensor, " d_out"]]:
    """Return Fisher diagonals of a block's layers as if one more token had been routed to each expert.

    An expert's diagonal is the sum of squared gradients over the tokens routed to it, divided by all tokens; without
    any it is zero, and nothing would be lost by removing the expert. Another text will use it. So the gradients of an
    average token are added: f + sum f' / tokens, the sum being over the experts' layers of the same kind.

    Args:
        diagonals: diagonal of each layer.
        modules: names of the modules of experts in the model.
        tokens: tokens of the text.

    Returns:
        The diagonals of all layers; those of other layers are unchanged.
    """
    siblings: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in diagonals:
        if is_expert_name(name, modules):
            expert, _, projection = name.rpartition(".")
            siblings[expert.rpartition(".")[0], projection].append(name)
    smoothed = dict(diagonals)
    for names in siblings.values():
        average = sum((diagonals[name] for name in names[1:]), diagonals[names[0]]) / tokens
        smoothed |= {name: diagonals[name] + average for name in names}
    return smoothed
