"""Units of compression: single layers, and layers that share a dictionary."""

from collections.abc import Sequence
from dataclasses import dataclass

from rocket_core.candidates import Candidate, LayerProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionUnit:
    """A layer to compress, or layers that share a dictionary.

    Attributes:
        names: the layers; the first owns the dictionary.
        input_group: first layer that reads the same input.
        candidates: the candidate of each layer.
    """

    names: tuple[str, ...]
    input_group: str
    candidates: tuple[Candidate, ...]

    @property
    def nnz(self) -> int:
        """Nonzeros of all layers."""
        return sum(candidate.nnz or 0 for candidate in self.candidates)


def group_units(chosen: Sequence[tuple[LayerProfile, Candidate]]) -> list[CompressionUnit]:
    """Return the units to compress, in the order of their first layers; layers that stay dense are left out."""
    layers: dict[str, list[tuple[LayerProfile, Candidate]]] = {}
    for profile, candidate in chosen:
        if candidate.kind != "dense":
            layers.setdefault(candidate.dictionary or profile.name, []).append((profile, candidate))
    return [
        CompressionUnit(
            names=tuple(profile.name for profile, _ in unit),
            input_group=unit[0][0].input_group,
            candidates=tuple(candidate for _, candidate in unit),
        )
        for unit in layers.values()
    ]


def shared_name(dictionary_owner: str) -> str:
    """Return the name under which the statistics of a group's concatenated weights are stored."""
    return f"{dictionary_owner}.shared"
