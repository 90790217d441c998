"""Finished work of a run on disk: each file is written atomically, so that a killed run can be resumed."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from rocket_core.allocation import Allocation
from rocket_core.calibration.samples import CalibrationInputs, RowCounts
from rocket_core.calibration.sensitivity import Sensitivity
from rocket_core.candidates import LayerProfile
from rocket_core.checkpoint import TensorEntry
from rocket_core.config import RUN_NAME
from rocket_core.errors import WorkFolderBusyError, WorkFolderError
from rocket_core.exports.output_folder import is_unfinished
from rocket_core.layers import LayerEntry
from rocket_core.linalg.whitening import Eigenbasis
from rocket_core.pipeline.state.files import (
    find_model,
    read_model,
    read_tensors,
    tensor_entries,
    write_model,
    write_tensors,
    write_text,
)
from rocket_core.pipeline.state.records import BlockRecord, EvaluationRecord, RefinedBlock, RunIdentity
from rocket_core.report.calibrated_text import CalibratedText
from rocket_core.report.quality import EvaluationReport
from rocket_core.report.schema import LayerOutcome, StageReport
from rocket_core.report.speed import SpeedReport
from rocket_core.system.files import locked

_LOCK_NAME = "lock"
_FOLDERS = (
    "sensitivities",
    "energies",
    "blocks",
    "profiles",
    "bases",
    "grams",
    "factors",
    "refined",
    "outcomes",
    "locks",
)


class WorkFolder:
    """The folder of one unfinished run.

    Args:
        path: the folder; created by `claim`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: ExitStack | None = None

    def check(self, identity: RunIdentity, *, resume: bool) -> None:
        """Raise an error if the folder holds work that this run must not continue.

        Args:
            identity: identity of the run.
            resume: whether to continue the work of an earlier run.

        Raises:
            InvalidConfigError: the folder holds unfinished work and `resume` is false.
            WorkFolderError: the work was done with another model, calibration, setting or version.
        """
        if self.is_claimed:
            if not resume:
                raise is_unfinished(self.path)
            _check_identity(self.path, read_model(self._identity_file, RunIdentity), identity)

    def claim(self, identity: RunIdentity, inputs: CalibrationInputs) -> None:
        """Lock the folder for this process, and create it if needed.

        The calibration samples are stored, because a resumed run must not depend on an unchanged remote dataset.

        Raises:
            WorkFolderBusyError: another process is using the folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path / _LOCK_NAME))
            except BlockingIOError as error:
                raise WorkFolderBusyError(
                    f"another process works in {self.path}; wait for it to end, or choose another output folder"
                ) from error
            self._lock = stack.pop_all()
        if not self.is_claimed:
            # Remains without an identity belong to no run: a run was killed while it removed its folder.
            for remains in self.path.iterdir():
                if remains.name != _LOCK_NAME:
                    shutil.rmtree(remains) if remains.is_dir() else remains.unlink()
        for folder in _FOLDERS:
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        write_model(self._identity_file, identity)
        if not self._inputs_file.is_file():
            write_model(self._rows_file, inputs.rows)
            write_tensors(self._inputs_file, inputs.tensors)

    @contextmanager
    def lock_block(self, stage: str, block: int) -> Iterator[bool]:
        """Yield whether the block is this process's while the context is active; if not, another works on it.

        Args:
            stage: what is done with blocks.
            block: index of the block.
        """
        with ExitStack() as stack:
            is_ours = True
            try:
                stack.enter_context(locked(self.path / "locks" / f"{stage}-{block:05}"))
            except BlockingIOError:
                is_ours = False
            yield is_ours

    @property
    def is_claimed(self) -> bool:
        """Whether the folder has an identity; without one, its content is ignored."""
        return self._identity_file.is_file()

    @property
    def stored_bytes(self) -> int:
        """Bytes of all files in the folder."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def release(self) -> None:
        """Release the folder for other processes."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def is_ours(self) -> bool:
        """Whether this process holds the folder's lock."""
        return self._lock is not None

    def remove(self) -> None:
        """Delete the folder, its identity first, so that a partly deleted folder is never taken for work."""
        self._identity_file.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def remove_if_idle(self) -> None:
        """Delete the folder if no layer in it is finished, so that it does not get in the way of a corrected run."""
        if not any((self.path / "profiles").glob("*.json")):
            self.remove()

    def inputs(self) -> CalibrationInputs | None:
        """Return the calibration samples, if they have been drawn."""
        if not (self.is_claimed and self._inputs_file.is_file()):
            return None
        return CalibrationInputs(tensors=read_tensors(self._inputs_file), rows=read_model(self._rows_file, RowCounts))

    @property
    def _identity_file(self) -> Path:
        return self.path / RUN_NAME

    @property
    def _inputs_file(self) -> Path:
        return self.path / "inputs.safetensors"

    @property
    def _rows_file(self) -> Path:
        return self.path / "rows.json"

    def stages(self) -> dict[str, StageReport]:
        """Return the cost of the stages in earlier runs."""
        file = self.path / "stages.json"
        if not (self.is_claimed and file.is_file()):
            return {}
        return {item["name"]: StageReport.model_validate(item) for item in json.loads(file.read_text())}

    def save_stages(self, stages: tuple[StageReport, ...]) -> None:
        """Store the cost of the stages so far."""
        write_text(self.path / "stages.json", json.dumps([stage.model_dump() for stage in stages]))

    def sensitivity(self, layer: str) -> Sensitivity | None:
        """Return the sensitivity of the loss to a layer's output, if it has been measured."""
        file = self.path / "sensitivities" / f"{layer}.safetensors"
        if not file.is_file():
            return None
        tensors = read_tensors(file)
        return Sensitivity(fisher_diagonal=tensors["curvature"], token_gradients=tensors.get("tokens"))

    def save_sensitivity(self, layer: str, sensitivity: Sensitivity) -> None:
        """Store the sensitivity of the loss to a layer's output."""
        tensors = {"curvature": sensitivity.fisher_diagonal}
        if sensitivity.token_gradients is not None:
            tensors["tokens"] = sensitivity.token_gradients
        write_tensors(self.path / "sensitivities" / f"{layer}.safetensors", tensors)

    def text(self) -> CalibratedText | None:
        """Return how well the original predicts the calibration text, if that has been measured."""
        return find_model(self._text_file, CalibratedText)

    def save_text(self, text: CalibratedText) -> None:
        """Store how well the original predicts the calibration text."""
        write_model(self._text_file, text)

    @property
    def _text_file(self) -> Path:
        # With the sensitivities, which are measured in the same pass and cached with profiles; no layer has this name.
        return self.path / "sensitivities" / "text.json"

    def output_energies(self, layer: str) -> torch.Tensor:
        """Return the squared norms of a layer's outputs over the calibration tokens, in float64, from profiling."""
        return read_tensors(self.path / "energies" / f"{layer}.safetensors")["energies"]

    def save_output_energies(self, layer: str, energies: torch.Tensor) -> None:
        """Store the squared norms of a layer's outputs."""
        write_tensors(self.path / "energies" / f"{layer}.safetensors", {"energies": energies})

    def block(self, index: int) -> BlockRecord | None:
        """Return the record of a finished block; None if it is not finished."""
        return find_model(self.path / "blocks" / f"{index:05}.json", BlockRecord)

    def save_block(self, index: int, record: BlockRecord) -> None:
        """Store the record of a block, which marks it as profiled."""
        write_model(self.path / "blocks" / f"{index:05}.json", record)

    def profile(self, layer: str) -> LayerProfile | None:
        """Return the profile of a finished layer; None if it is not finished."""
        return find_model(self.path / "profiles" / f"{layer}.json", LayerProfile)

    def save_profile(self, profile: LayerProfile) -> None:
        """Store the profile of a layer, which marks it as profiled."""
        write_model(self.path / "profiles" / f"{profile.name}.json", profile)

    def basis(self, layer: str) -> Eigenbasis | None:
        """Return the eigenbasis of a layer; None if the quota left no room for it."""
        file = self.path / "bases" / f"{layer}.safetensors"
        if not file.is_file():
            return None
        tensors = read_tensors(file)
        return Eigenbasis(directions=tensors["directions"], singular_values=tensors["singular_values"])

    def has_basis(self, layer: str) -> bool:
        """Return whether the eigenbasis of a layer is stored."""
        return (self.path / "bases" / f"{layer}.safetensors").is_file()

    def gram(self, group: str) -> torch.Tensor | None:
        """Return the Gram matrix of an input group; None if the quota left no room for it."""
        file = self.path / "grams" / f"{group}.safetensors"
        return read_tensors(file)["gram"] if file.is_file() else None

    def has_gram(self, group: str) -> bool:
        """Return whether the Gram matrix of an input group is stored."""
        return (self.path / "grams" / f"{group}.safetensors").is_file()

    def save_gram(self, group: str, gram: torch.Tensor, *, quota: int) -> None:
        """Store a Gram matrix if all stored statistics stay within `quota` bytes."""
        if not self.has_gram(group) and self._statistics_bytes() + gram.nbytes <= quota:
            write_tensors(self.path / "grams" / f"{group}.safetensors", {"gram": gram})

    def _statistics_bytes(self) -> int:
        return sum(
            file.stat().st_size for kind in ("bases", "grams") for file in (self.path / kind).glob("*.safetensors")
        )

    def save_basis(self, layer: str, basis: Eigenbasis, *, quota: int) -> None:
        """Store an eigenbasis if all stored statistics stay within `quota` bytes."""
        size = basis.directions.nbytes + basis.singular_values.nbytes
        if self._statistics_bytes() + size <= quota:
            tensors = {"directions": basis.directions, "singular_values": basis.singular_values}
            write_tensors(self.path / "bases" / f"{layer}.safetensors", tensors)

    def allocation(self) -> Allocation | None:
        """Return the allocation, if it has been made."""
        return find_model(self.path / "allocation.json", Allocation)

    def save_allocation(self, allocation: Allocation) -> None:
        """Store the allocation."""
        write_model(self.path / "allocation.json", allocation)

    def factors(self, layer: str) -> dict[str, TensorEntry] | None:
        """Return the locations of a factorized layer's tensors, by the suffix of their names after the layer's name."""
        file = self.path / "factors" / f"{layer}.safetensors"
        return tensor_entries(file) if file.is_file() else None

    def codes(self, layer: str) -> LayerEntry | None:
        """Return how the codes of a quantized layer are stored; None if its tensors are factors."""
        return find_model(self.path / "factors" / f"{layer}.json", LayerEntry)

    def save_factors(self, layer: str, tensors: Mapping[str, torch.Tensor], *, codes: LayerEntry | None = None) -> None:
        """Store the factors or codes of a layer, which marks it as factorized.

        Args:
            layer: its name.
            tensors: its tensors, by the suffix of their names after the layer's name.
            codes: how codes are stored, which their tensors do not tell; None for factors.
        """
        if codes is not None:
            write_model(self.path / "factors" / f"{layer}.json", codes)
        write_tensors(self.path / "factors" / f"{layer}.safetensors", tensors)

    def refined(self, index: int) -> RefinedBlock | None:
        """Return the record of a refined block; None if it is not refined."""
        return find_model(self.path / "refined" / f"{index:05}.json", RefinedBlock)

    def refined_blocks(self) -> dict[int, RefinedBlock]:
        """Return the records of all refined blocks by index, in order."""
        files = sorted((self.path / "refined").glob("*.json"))
        return {int(file.stem): read_model(file, RefinedBlock) for file in files}

    def refined_tensors(self, index: int) -> dict[str, TensorEntry]:
        """Return the locations of a refined block's tensors: those of its layers, and of its norms and biases."""
        return tensor_entries(self.path / "refined" / f"{index:05}.safetensors")

    def save_refined(self, index: int, tensors: Mapping[str, torch.Tensor], record: RefinedBlock) -> None:
        """Store the tensors of a block, and its record, which marks it as refined."""
        write_tensors(self.path / "refined" / f"{index:05}.safetensors", tensors)
        write_model(self.path / "refined" / f"{index:05}.json", record)

    def outcome(self, layer: str) -> LayerOutcome | None:
        """Return the outcome of a compressed layer; None if it is not finished."""
        return find_model(self.path / "outcomes" / f"{layer}.json", LayerOutcome)

    def save_outcome(self, layer: str, outcome: LayerOutcome) -> None:
        """Store the outcome of a layer, whose factors are stored already, which marks it as compressed."""
        write_model(self.path / "outcomes" / f"{layer}.json", outcome)

    def begin_publishing(self) -> None:
        """Record that artifacts are being moved into place: those found there from now on are this run's."""
        write_text(self.path / "publishing", "")

    @property
    def is_publishing(self) -> bool:
        """Whether a run was stopped while it moved artifacts into place."""
        return self.is_claimed and (self.path / "publishing").is_file()

    def new_export(self, kind: str) -> Path:
        """Return an empty folder for a new artifact."""
        path = self.path / "exports" / kind
        self._export_mark(kind).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def finish_export(self, kind: str) -> None:
        """Mark an artifact as written."""
        write_text(self._export_mark(kind), "")

    def finished_export(self, kind: str) -> Path | None:
        """Return the folder of a written artifact; None if it is not complete, or has been moved into place."""
        path = self.path / "exports" / kind
        return path if self._export_mark(kind).is_file() and path.is_dir() else None

    def _export_mark(self, kind: str) -> Path:
        return self.path / "exports" / f"{kind}.written"

    def new_scratch(self) -> Path:
        """Return an empty folder for temporary files of this process."""
        path = self.path / "scratch"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def evaluation(self, requested: EvaluationRecord) -> EvaluationReport | None:
        """Return the result of a finished evaluation with the same settings on the same text."""
        record = find_model(self.path / "evaluation.json", EvaluationRecord)
        if record is None or record.model_copy(update={"report": None}) != requested:
            return None
        return record.report

    def save_evaluation(self, record: EvaluationRecord, report: EvaluationReport) -> None:
        """Store a finished evaluation."""
        write_model(self.path / "evaluation.json", record.model_copy(update={"report": report}))

    def speed(self) -> SpeedReport | None:
        """Return the result of a finished benchmark."""
        return find_model(self.path / "speed.json", SpeedReport)

    def save_speed(self, report: SpeedReport) -> None:
        """Store a finished benchmark."""
        write_model(self.path / "speed.json", report)


def _check_identity(path: Path, stored: RunIdentity, requested: RunIdentity) -> None:
    differences = [
        f"{name} was {getattr(stored, name)!r} and is now {getattr(requested, name)!r}"
        for name in ("rocket_version", "model", "revision")
        if getattr(stored, name) != getattr(requested, name)
    ]
    differences += [
        f"{name} was {stored.settings.get(name)!r} and is now {value!r}"
        for name, value in requested.settings.items()
        if stored.settings.get(name) != value
    ]
    if differences:
        raise WorkFolderError(
            f"{path} holds the work of another run: {'; '.join(differences)}. Resume with the same choices, or remove "
            "that folder to start afresh"
        )
