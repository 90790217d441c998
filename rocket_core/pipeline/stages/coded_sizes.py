"""Bytes of entropy-coded layers: what the allocation and earlier layers leave of the budget goes to the next ones."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rocket_core.pipeline.stages.units import CompressionUnit
from rocket_core.pipeline.state.work_folder import WorkFolder


class CodedSizes:
    """The bytes that each entropy-coded layer may take.

    A layer is coded in slightly fewer bytes than it may take. What is left is divided among all unfinished layers in
    proportion to their bytes. The result depends only on which layers are finished and which blocks refined, and this
    always happens in the same order, so that a resumed run ends with the same bytes.

    Args:
        work: work folder with the outcomes of finished layers.
        units: all units.
        spare: bytes of the budget that the allocation left.
    """

    def __init__(self, work: WorkFolder, units: Sequence[CompressionUnit], spare: int) -> None:
        self._work = work
        self._unfinished = [unit for unit in units if _is_coded(unit)]
        self._spare = spare

    def note_refined(self, stored_bytes: Mapping[str, int]) -> None:
        """Note the bytes that finished layers take after refinement of their block."""
        for layer, taken in stored_bytes.items():
            outcome = self._work.outcome(layer)
            if outcome is not None:
                self._spare += outcome.stored_bytes - taken

    def sized(self, unit: CompressionUnit) -> CompressionUnit:
        """Return an unfinished unit with the bytes that it may take; other kinds are unchanged."""
        if not _is_coded(unit):
            return unit
        unfinished = []
        for other in self._unfinished:
            outcome = self._work.outcome(other.names[0])
            if outcome is None:
                unfinished.append(other)
            else:
                self._spare += _bytes(other) - outcome.stored_bytes
        self._unfinished = unfinished
        share = max(0, self._spare) * _bytes(unit) // sum(map(_bytes, unfinished))
        [candidate] = unit.candidates
        return replace(unit, candidates=(candidate.model_copy(update={"stored_bytes": _bytes(unit) + share}),))


def _is_coded(unit: CompressionUnit) -> bool:
    return unit.candidates[0].kind == "entropy_coded"


def _bytes(unit: CompressionUnit) -> int:
    return unit.candidates[0].stored_bytes
