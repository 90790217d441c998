"""An artifact of this library, opened to read its layers one at a time."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from rocket_core.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from rocket_core.checkpoint.reader import DTYPES
from rocket_core.errors import CheckpointFormatError, CorruptCheckpointError, InvalidConfigError, ModelNotFoundError
from rocket_core.exports.artifact_folder import artifact_folders, read_settings
from rocket_core.hf.names import StockLayer, find_modules
from rocket_core.hf.quantizer import RocketConfig
from rocket_core.hf.replacement import StoredLayer, empty_layer, features
from rocket_core.inspection.files.model_advice import advice_on_folder, advice_on_path
from rocket_core.inspection.files.model_files import CONFIG_NAME, vet_folder
from rocket_core.layers import QUANT_METHOD, FactorizedLinear, LayerEntry, entry_codes
from rocket_core.linalg.integer_codes import RoundedWeight
from rocket_core.models.architecture import build_architecture
from rocket_core.models.pretrained import load_config

_NAME = "rocket"
_QUANTIZATION = "quantization_config"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredArtifact:
    """An opened artifact.

    Attributes:
        folder: its folder.
        settings: content of its `config.json`, without the table of stored layers.
        checkpoint: its safetensors.
        model: the model without weights; every expert of a mixture has its own layers.
        entries: the stored layers, by their names in the files.
        modules: name in the model and stock layer of each.
        dtype: dtype of the model.
    """

    folder: Path
    settings: Mapping[str, Any]
    checkpoint: Checkpoint
    model: PreTrainedModel
    entries: Mapping[str, LayerEntry]
    modules: Mapping[str, tuple[str, StockLayer]]
    dtype: torch.dtype

    def shape(self, name: str) -> tuple[int, int]:
        """Return `(d_in, d_out)` of a stored layer."""
        return features(self.modules[name][1])

    def stock_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the dense weight of a stored layer, as the model stores it."""
        return tuple(self.modules[name][1].weight.shape)

    def stored_by(self, key: str) -> str | None:
        """Return the stored layer that a tensor of the files describes; None for any other tensor, and for biases."""
        stem, _, part = key.rpartition(".")
        return stem if stem in self.entries and part != "bias" else None

    def dense_weight(self, name: str) -> Float[Tensor, "rows columns"]:
        """Return the dense weight of a stored layer, as the model stores it, in the model's dtype.

        Raises:
            CorruptCheckpointError: its tensors are damaged or missing.
        """
        layer = self._layer(name)
        weight = layer.dense_weight(self.dtype)
        return weight.T if getattr(layer, "transposed", False) else weight

    def codes(self, name: str) -> RoundedWeight:
        """Return codes and scales of a quantized layer.

        Raises:
            CorruptCheckpointError: its tensors are damaged or missing.
        """
        return entry_codes(self.entries[name], self._tensors(name), self.shape(name), layer=name)

    def _layer(self, name: str) -> StoredLayer:
        entry = self.entries[name]
        owner = None if entry.dictionary is None else self._layer(entry.dictionary)
        assert owner is None or isinstance(owner, FactorizedLinear), "the table has been checked"
        layer = empty_layer(self.modules[name][1], entry, name, owner)
        tensors = self._tensors(name)
        expected = {key: tuple(part.shape) for key, part in layer.state_dict().items() if key != "bias"}
        found = {key: tuple(part.shape) for key, part in tensors.items()}
        if found != expected:
            raise CorruptCheckpointError(
                f"{self.folder}: layer {name!r} has tensors of the shapes {found}, and by config.json {expected}; copy "
                "the files again"
            )
        layer.load_state_dict(tensors, strict=False, assign=True)
        return layer

    def _tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a stored layer but its bias, by the end of their names."""
        entries = self.checkpoint.entries
        keys = [key for key in entries if key.startswith(f"{name}.") and self.stored_by(key) == name]
        return {key.removeprefix(f"{name}."): entries[key].read() for key in keys}


def open_artifact(folder: Path) -> StoredArtifact:
    """Open the folder of an artifact; no weights are read.

    Args:
        folder: the folder with its `config.json`.

    Raises:
        ModelNotFoundError: there is no model in the folder.
        InvalidConfigError: the model in it was not compressed by this library.
        CheckpointError: its files are damaged or unsafe.
    """
    if not (folder / CONFIG_NAME).is_file():
        raise ModelNotFoundError(_no_model(folder))
    vet_folder(folder, folder.name)
    settings = read_settings(folder)
    table = settings.pop(_QUANTIZATION, None)
    if not isinstance(table, dict) or table.get("quant_method") != QUANT_METHOD:
        raise InvalidConfigError(
            f"{folder} is not an artifact of `rocket compress`: its config.json names "
            f"{_stored_as(table)}; give the folder `{_NAME}` of a compression"
        )
    entries = RocketConfig(**table).layers
    checkpoint = open_checkpoint(folder)
    dtype = _dtype(checkpoint.entries.values(), settings)
    config = load_config(folder)
    del config.quantization_config
    model = build_architecture(config, dtype).model
    modules = find_modules(model, entries)
    if missing := entries.keys() - modules.keys():
        raise CheckpointFormatError(
            f"{folder}: config.json lists layer {min(missing)!r}, which the model does not have; restore the "
            "config.json that belongs to these weights"
        )
    return StoredArtifact(
        folder=folder,
        settings=settings,
        checkpoint=checkpoint,
        model=model,
        entries=entries,
        modules=modules,
        dtype=dtype,
    )


def _no_model(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder; {advice_on_path(folder) or f'give the folder `{_NAME}` of a compression'}"
    for place in artifact_folders(folder):
        if (place / CONFIG_NAME).is_file():
            return f"{folder} has no {CONFIG_NAME}; did you mean {place}?"
    return f"{folder} has no {CONFIG_NAME}; {advice_on_folder(folder)}"


def _stored_as(table: object) -> str:
    if not isinstance(table, dict):
        return "no stored layers"
    return f"the quantization method {table.get('quant_method')!r}"


def _dtype(tensors: Iterable[TensorEntry], settings: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the model: that of most bytes apart from codes, or else what its settings name."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        stored = DTYPES.get(tensor.dtype)
        if stored is not None and stored.is_floating_point:
            sizes[stored] += tensor.nbytes
    if sizes:
        return sizes.most_common(1)[0][0]
    named = getattr(torch, str(settings.get("dtype") or settings.get("torch_dtype")), None)
    return named if isinstance(named, torch.dtype) and named.is_floating_point else torch.float32
