"""State of unfinished healing on disk, from which a stopped run resumes."""

import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rocket_core.checkpoint import TensorEntry
from rocket_core.pipeline.state.files import read_model, read_tensors, tensor_entries, write_model, write_tensors
from rocket_core.report.healing import HealingReport

# A killed run loses at most the steps of this many seconds, or of so many times what it takes to store them.
_SECONDS = 60.0
_TIMES_ITS_COST = 20


class HealingState:
    """Text, checkpoint and result of healing.

    Args:
        folder: folder of the files; created by the first that is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pause = _SECONDS
        self._saved_at = time.monotonic()

    @classmethod
    def within(cls, work: Path) -> "HealingState":
        """Return the state in a work folder.

        Args:
            work: the folder.
        """
        return cls(work / "healing")

    def windows(self) -> Tensor | None:
        """Return the windows of text, if they have been drawn."""
        file = self._folder / "windows.safetensors"
        return read_tensors(file)["windows"] if file.is_file() else None

    def save_windows(self, windows: Tensor) -> None:
        """Store the windows of text, because a resumed run must not depend on an unchanged remote dataset."""
        self._write("windows.safetensors", {"windows": windows})

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint should be stored."""
        return time.monotonic() - self._saved_at >= self._pause

    def checkpoint(self) -> dict[str, Tensor] | None:
        """Return the tensors of the last checkpoint, if there is one."""
        file = self._folder / "checkpoint.safetensors"
        return read_tensors(file) if file.is_file() else None

    def save_checkpoint(self, tensors: Mapping[str, Tensor]) -> None:
        """Store a checkpoint instead of the last."""
        began = time.monotonic()
        self._write("checkpoint.safetensors", tensors)
        self._saved_at = time.monotonic()
        self._pause = max(_SECONDS, _TIMES_ITS_COST * (self._saved_at - began))

    def result(self) -> tuple[dict[str, TensorEntry], HealingReport] | None:
        """Return where the healed tensors are, by their names in the artifact, and the report; None if unfinished."""
        report = self._folder / "report.json"
        if not report.is_file():
            return None
        return tensor_entries(self._folder / "healed.safetensors"), read_model(report, HealingReport)

    def save_result(self, tensors: Mapping[str, Tensor], report: HealingReport) -> None:
        """Store the healed tensors and the report, which marks healing as finished."""
        self._write("healed.safetensors", tensors)
        write_model(self._folder / "report.json", report)

    def _write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_tensors(self._folder / name, tensors)
