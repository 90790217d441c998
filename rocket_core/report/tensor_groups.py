"""What became of every tensor of the original, as it appears in reports. Loads no torch."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from rocket_core.schema import FrozenModel

Fate = Literal["compressed", "kept", "converted", "left out", "added"]
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_Count = Annotated[int, Field(ge=0)]


class TensorGroup(FrozenModel):
    """Tensors to which the same happened, and whose names differ in the numbers of blocks and experts alone."""

    name: str
    """their name, with `*` for numbers."""
    fate: Fate
    """`compressed`; `kept`, to the byte or in another order; `converted` to another dtype; `left out`, because the
    engine computes it or shares another, or because `transformers` does not run the block that it belongs to; or
    `added`, which the original does not have.
    """
    tensors: _Count
    """number of tensors in the original; of an added one, in the artifact."""
    original_bytes: _Count
    """their bytes in the original."""
    stored_bytes: _Count
    """bytes of what they became in the artifact, without headers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorAccount:
    """What became of one tensor; the attributes are as in `TensorGroup`."""

    name: str
    fate: Fate
    original_bytes: int
    stored_bytes: int


def grouped(accounts: Iterable[TensorAccount]) -> tuple[TensorGroup, ...]:
    """Return tensors by name without numbers and by fate, in the order of the first of each."""
    groups: dict[tuple[str, Fate], TensorGroup] = {}
    for account in accounts:
        name = _NUMBER.sub("*", account.name)
        before = groups.get((name, account.fate))
        groups[name, account.fate] = TensorGroup(
            name=name,
            fate=account.fate,
            tensors=1 + (before.tensors if before else 0),
            original_bytes=account.original_bytes + (before.original_bytes if before else 0),
            stored_bytes=account.stored_bytes + (before.stored_bytes if before else 0),
        )
    return tuple(groups.values())
