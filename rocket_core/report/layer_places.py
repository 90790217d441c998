"""Shape of layers, and their block and projection, from their names. Loads no torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from rocket_core.schema import FrozenModel

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """Name and shape of a layer, and for an expert the tokens that reached it, as a `LayerProfile` also has them."""

    name: str
    d_in: int
    d_out: int
    routed_tokens: int | None


class Place(FrozenModel):
    """Where a layer is in its model."""

    block: str
    """number of its block, after the list if there are several; empty for a layer in no block."""
    projection: str
    """the rest of its name."""


def places_of(names: Sequence[str]) -> list[Place]:
    """Return the block and the projection of each layer: the parts of its name before and after the first number."""
    split = [_split(name) for name in names]
    lists = {head for head, number, _ in split if number}
    # With one list of blocks the number suffices; with several (an encoder and a decoder) add the part that differs.
    parts = [head.split(".") for head in lists]
    common = len(list(takewhile(lambda at: len(set(at)) == 1, zip(*parts, strict=False)))) if len(lists) > 1 else 0
    return [
        Place(
            block=number
            if len(lists) == 1 or not number
            else f"{(head.split('.')[common:] or [''])[0]} {number}".strip(),
            projection=rest or name,
        )
        for name, (head, number, rest) in zip(names, split, strict=True)
    ]


def general_name(name: str) -> str:
    """Return the name that a layer shares with those of its block which differ in numbers alone, such as experts."""
    head, number, rest = _split(name)
    parts = ["*" if _NUMBER.fullmatch(part) else part for part in rest.split(".")]
    return ".".join(part for part in (head, number, *parts) if part)


def _split(name: str) -> tuple[str, str, str]:
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if _NUMBER.fullmatch(part)), None)
    if at is None:
        return "", "", name
    return ".".join(parts[:at]), parts[at], ".".join(parts[at + 1 :])
