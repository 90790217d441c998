"""What a work folder holds as JSON, apart from models of other packages."""

import hashlib
import json

from rocket_core.config import EvaluationConfig
from rocket_core.layers import LayerEntry
from rocket_core.report.quality import EvaluationReport
from rocket_core.schema import FrozenModel


class RunIdentity(FrozenModel):
    """Identity of a work folder. Work done under one identity cannot be used under another."""

    rocket_version: str
    """version of the library."""
    model: str
    """name of the model."""
    revision: str
    """commit, or hash of the weights."""
    settings: dict[str, object]
    """all settings, as in JSON."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all fields, hexadecimal."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()


class BlockRecord(FrozenModel):
    """A profiled block."""

    layers: tuple[str, ...]
    """its profiled layers, in model order."""
    groups: tuple[tuple[str, ...], ...]
    """the layers that read the same input, in the order in which they are first called."""
    skipped: dict[str, str]
    """layers left alone, with the reason."""


class RefinedBlock(FrozenModel):
    """A refined block, whose tensors are stored before this record."""

    codes: dict[str, LayerEntry]
    """how the codes of its layers are stored, as `WorkFolder.codes`."""
    stored_bytes: dict[str, int]
    """bytes of each refined layer, as in its outcome; entropy-coded layers of a block may exchange some."""
    vectors: dict[str, str]
    """its norms and biases, with the key of each in the checkpoint, under which its tensor is stored."""
    error_before: float
    """mean squared difference to the dense block's output per token, on calibration samples that are held out."""
    error_after: float
    """after refinement, see `BlockReport`."""


class EvaluationRecord(FrozenModel):
    """A finished evaluation, with what identifies it."""

    settings: EvaluationConfig
    """the requested settings."""
    text_sha256: str
    """hash of what the models read."""
    report: EvaluationReport | None = None
    """the result; None in a query."""
