"""Units of compression: single layers, and layers that share a dictionary; and the bytes that each may take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.pipeline.state.work_folder import WorkFolder


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


class CodedSizes:
    """The bytes that each entropy-coded layer may take.

    A layer is coded in slightly fewer bytes than it may take. What is left is divided among all unfinished layers in
    proportion to their bytes. The result depends only on which layers are finished and which blocks refined, and this
    always happens in the same order, so that a resumed run ends with the same bytes.

    Args:
        work: work folder with the outcomes of finished layers.
        units: all units.
        left: bytes of the budget that the allocation left; None where each layer may take those of its candidate only.
    """

    def __init__(self, work: WorkFolder, units: Sequence[CompressionUnit], left: int | None) -> None:
        self._work = work
        self._unfinished = [unit for unit in units if _is_coded(unit)]
        self._left = left

    @classmethod
    def of_block(
        cls, work: WorkFolder, block: Sequence[CompressionUnit], units: Sequence[CompressionUnit], left: int | None
    ) -> "CodedSizes":
        """Return the sizes of a block's layers, which depend on no other block: it gets its part of what is left.

        Args:
            work: work folder with the outcomes of finished layers.
            block: units of the block.
            units: all units.
            left: bytes of the budget that the allocation left.
        """
        if left is None:
            return cls(work, block, None)
        whole = sum(_bytes(unit) for unit in units if _is_coded(unit))
        own = sum(_bytes(unit) for unit in block if _is_coded(unit))
        return cls(work, block, max(0, left) * own // whole if whole else 0)

    def note_refined(self, stored_bytes: Mapping[str, int]) -> None:
        """Note the bytes that finished layers take after refinement of their block."""
        for layer, taken in stored_bytes.items():
            outcome = self._work.outcome(layer)
            if outcome is not None and self._left is not None:
                self._left += outcome.stored_bytes - taken

    def sized(self, unit: CompressionUnit) -> CompressionUnit:
        """Return an unfinished unit with the bytes that it may take; other kinds are unchanged."""
        if self._left is None or not _is_coded(unit):
            return unit
        unfinished = []
        for other in self._unfinished:
            outcome = self._work.outcome(other.names[0])
            if outcome is None:
                unfinished.append(other)
            else:
                self._left += _bytes(other) - outcome.stored_bytes
        self._unfinished = unfinished
        share = max(0, self._left) * _bytes(unit) // sum(map(_bytes, unfinished))
        [candidate] = unit.candidates
        return replace(unit, candidates=(candidate.model_copy(update={"stored_bytes": _bytes(unit) + share}),))


def _is_coded(unit: CompressionUnit) -> bool:
    return unit.candidates[0].kind == "entropy_coded"


def _bytes(unit: CompressionUnit) -> int:
    return unit.candidates[0].stored_bytes
