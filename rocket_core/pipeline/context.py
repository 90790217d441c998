"""The context of a compression: its model, its configuration, and values derived from both."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from rocket_core.calibration.inputs import InputSource
from rocket_core.checkpoint import Checkpoint, ModelSource, PartEntry, TensorEntry, WeightLoader
from rocket_core.config import CompressionConfig
from rocket_core.exports.gguf_model import GgufPlan
from rocket_core.methods import Method, method_for
from rocket_core.models.architecture import Architecture, build_architecture, read_config
from rocket_core.models.token_tables import TokenTable

FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One compression: the model, the layers to compress, and the settings.

    Attributes:
        config: all settings.
        source: location of the model's files.
        checkpoint: safetensors of the model.
        architecture: the model without weights.
        loader: loads weights into the model's modules.
        inputs: source of the calibration inputs; None if nothing is calibrated.
        device: compute device.
        others: further devices, each with its own process that profiles and compresses blocks.
        dtype: dtype in which the model is stored.
        compute_dtype: dtype in which it runs.
        sequence_length: tokens per calibration window; for images, positions of one image.
        positions: positions of a sample that pass through blocks, summed over all lists of blocks.
        layers: compressible layers of each block, without the ignored ones.
        skipped: layers left alone, with the reason.
        tables: token embedding and head to profile.
        gguf: what the GGUF file contains, if one is written.
        idle: modules that the calibration inputs do not reach, such as the tower of images for text.
    """

    config: CompressionConfig
    source: ModelSource
    checkpoint: Checkpoint
    architecture: Architecture
    loader: WeightLoader
    inputs: InputSource | None
    device: torch.device
    dtype: torch.dtype
    compute_dtype: torch.dtype
    sequence_length: int
    positions: int
    layers: tuple[tuple[str, ...], ...]
    skipped: dict[str, str]
    others: tuple[torch.device, ...] = ()
    tables: tuple[TokenTable, ...] = ()
    gguf: GgufPlan | None = None
    idle: tuple[str, ...] = ()

    @property
    def held_dtype(self) -> torch.dtype | None:
        """Dtype to which hidden states are rounded between blocks; None to keep that in which they are computed.

        Those of a bfloat16 model are rounded as they would be where it runs in bfloat16. float16 does not suffice, as
        hidden states of some models exceed its range, which float32 computes well.
        """
        return torch.bfloat16 if self.dtype == torch.bfloat16 != self.compute_dtype else None

    @property
    def precision(self) -> torch.dtype:
        """Dtype of supports and least squares."""
        return FLOATS[self.config.precision]

    @property
    def method(self) -> Method:
        """The compression method."""
        return method_for(self.config, self.dtype.itemsize)

    def stored_bytes(self, layer: str) -> int:
        """Return the bytes of a layer's dense weight in the artifact: as stored, unless a dtype is configured."""
        entry = self._entry(layer)
        return entry.nbytes if self.config.dtype == "auto" else math.prod(entry.shape) * self.dtype.itemsize

    def original_bytes(self, layer: str) -> int:
        """Return the bytes that a layer's weight takes in the checkpoint, which may store it in few bits."""
        return self.stored_bytes(layer) if self.checkpoint.coded is None else self._entry(layer).file_bytes

    def disk_name(self, layer: str) -> str:
        """Return the name of a layer in the artifact's files: that in the checkpoint, where it has one."""
        return self._entry(layer).key.removesuffix(".weight")

    def artifact_entries(self, stored: Iterable[str]) -> Mapping[str, TensorEntry]:
        """Return the tensors of the `rocket` artifact by name, before layers are replaced by their stored forms.

        These are the checkpoint's. If a stored layer is an expert within a tensor of all experts, all such tensors are
        split, so that the artifact has one layout.

        Args:
            stored: layers that do not stay dense.
        """
        if not any(isinstance(self._entry(layer), PartEntry) for layer in stored):
            return self.checkpoint.entries
        return self.split_entries()

    def split_entries(self) -> Mapping[str, TensorEntry]:
        """Return the tensors of the checkpoint by name, with those of all experts split into those of each."""
        split: dict[str, TensorEntry] = {}
        for key, entry in self.checkpoint.entries.items():
            parts: Mapping[str, TensorEntry] = self.loader.parts(key)
            split |= parts or {key: entry}
        return split

    def _entry(self, layer: str) -> TensorEntry:
        entry = self.loader.entry(f"{layer}.weight")
        assert entry is not None, layer
        return entry


def in_float32(run: Run) -> Run:
    """Return a run with a model that computes in float32 at least: where small differences between models count."""
    if run.compute_dtype.itemsize >= torch.float32.itemsize:
        return run
    config = read_config(run.source.folder)
    architecture = build_architecture(config, torch.float32, vision=run.config.includes_vision)
    loader = WeightLoader(architecture.model, run.checkpoint, run.device)
    return replace(run, architecture=architecture, loader=loader, compute_dtype=torch.float32)
