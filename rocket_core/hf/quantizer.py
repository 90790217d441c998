"""Quantization configuration and quantizer, which transformers uses to load and save compressed models."""

from collections.abc import Collection, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from rocket_core.errors import CheckpointFormatError, CorruptCheckpointError, RocketError
from rocket_core.experts import fuse, has_unfused, unfuse, unfused_conversions
from rocket_core.hf.names import find_modules, names_experts, with_and_without
from rocket_core.hf.replacement import (
    StoredLayer,
    empty_layer,
    install_layer,
    restore_layers,
    stored_entries,
    stored_layers,
)
from rocket_core.layers import (
    CODED_FACTOR_NAMES,
    FORMAT_VERSION,
    QUANT_METHOD,
    FactorizedLinear,
    StoredLinear,
    format_version,
    quantization_config,
    read_entries,
)

# Tensors that a stock layer does not have.
_PARTS = {*CODED_FACTOR_NAMES} - {"weight"}


class _TensorForm(NamedTuple):
    """Shape of a tensor, and whether it consists of bytes; other dtypes are cast while loading."""

    shape: tuple[int, ...]
    is_bytes: bool

    def __str__(self) -> str:
        return f"shape {self.shape}{' of bytes' if self.is_bytes else ''}"


class RocketConfig(QuantizationConfigMixin):
    """The `quantization_config` of a compressed model.

    Attributes:
        layers: the stored layers, by their name in the checkpoint files.
        keep_packed: whether to leave coefficients and codes packed in memory, or to unpack all of them; None for what
            is fastest, or as fast in less memory: see `StoredLinear.prepare_`. Written to disk only if set.

    Raises:
        CheckpointFormatError: the disk format is a newer version, keys are unknown, or the table is inconsistent.
    """

    def __init__(
        self,
        layers: Mapping[str, Any] | None = None,
        format_version: Any = FORMAT_VERSION,
        keep_packed: bool | None = None,
        **unknown: Any,
    ) -> None:
        unknown.pop("quant_method", None)
        if type(format_version) is not int or not 1 <= format_version <= FORMAT_VERSION:
            raise CheckpointFormatError(
                f"the checkpoint has format version {format_version!r}; this rocket-compress reads up to "
                f"{FORMAT_VERSION}: upgrade it"
            )
        if unknown:
            raise CheckpointFormatError(
                f"quantization_config has keys that format {format_version} does not know: {sorted(unknown)}"
            )
        self.quant_method: Any = QUANT_METHOD
        self.keep_packed = keep_packed
        self.layers = read_entries({} if layers is None else layers, format_version)

    @property
    def format_version(self) -> int:
        """Version of the disk format that the layers are written in."""
        return format_version(self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for `config.json`."""
        return quantization_config(self.layers) | (
            {} if self.keep_packed is None else {"keep_packed": self.keep_packed}
        )


class RocketHfQuantizer(HfQuantizer):
    """A quantizer that replaces the layers in the table with stored layers before transformers loads the weights."""

    requires_calibration = True  # refuses to quantize while loading
    # Adapters may be trained; so may the factors themselves, but not integer codes.
    is_trainable = is_qat_trainable = True
    is_compileable = True
    quantization_config: RocketConfig
    # Size of the packed model, and what preparing adds to it on a CPU and elsewhere.
    _packed_bytes = _bytes_on_cpu = _bytes_elsewhere = 0
    _unfused = False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        entries = self.quantization_config.layers
        if names_experts(model, entries):
            unfuse(model)
        self._unfused = has_unfused(model)
        stored = _stored_forms(kwargs.get("checkpoint_files") or [])
        _untie_stored(model, entries, stored)
        modules = find_modules(model, entries)
        layers: dict[str, StoredLayer] = {}
        for name, (module_name, stock) in sorted(modules.items(), key=lambda item: entries[item[0]].is_follower):
            entry = entries[name]
            owner = None if entry.dictionary is None else layers[entry.dictionary]
            assert owner is None or isinstance(owner, FactorizedLinear), "the table has been checked"
            layer = layers[name] = empty_layer(stock, entry, name, owner)
            install_layer(model, module_name, layer)
        self._packed_bytes = sum(parameter.nbytes for parameter in model.parameters())
        prepares = self.quantization_config.keep_packed is None
        expanding = [layer for _, layer in stored_layers(model) if isinstance(layer, StoredLinear)]
        self._bytes_elsewhere = sum(layer.unpacking_bytes for layer in expanding)
        on_cpu = sum(layer.preparing_bytes_on_cpu for layer in expanding)
        self._bytes_on_cpu = on_cpu if prepares else self._bytes_elsewhere
        left_out = entries.keys() - layers.keys()
        _check_files(stored, layers, model.base_model_prefix, left_out)

    def update_weight_conversions(self, weight_conversions: list[Any], *model: Any) -> list[Any]:
        """Return the conversions from the names in the files to those of the model, whose experts may be unfused.

        Args:
            weight_conversions: those that transformers would use.
            model: the model, which transformers passes since 5.21.
        """
        found: list[Any] = super().update_weight_conversions(weight_conversions, *model)  # type: ignore[no-untyped-call]
        return unfused_conversions(found) if self._unfused else found

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        keep_packed = self.quantization_config.keep_packed
        if not keep_packed:
            # Offloaded layers are on the meta device here: they stay packed, as embeddings always do.
            stored = [layer for _, layer in stored_layers(model) if isinstance(layer, StoredLinear)]
            layers = [layer for layer in stored if not layer.offloaded]
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                list(pool.map(lambda layer: layer.prepare_() if keep_packed is None else layer.unpack_(), layers))
        return model

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        """Reserve memory for unpacking, as transformers distributes the packed layers over the devices.

        Args:
            max_memory: bytes by device; transformers has already converted sizes like "1GiB" to numbers.
        """
        return {device: int(limit * self._packed_share(device)) for device, limit in max_memory.items()}

    def _packed_share(self, device: Any) -> float:
        """Return the bytes of the packed model as a part of those it will take on a device."""
        if self.quantization_config.keep_packed or self._packed_bytes == 0:
            return 1.0
        extra = self._bytes_on_cpu if device == "cpu" else self._bytes_elsewhere
        return self._packed_bytes / (self._packed_bytes + extra)

    def get_state_dict_and_metadata(self, model: PreTrainedModel, *_: Any, **__: Any) -> tuple[None, dict[str, Any]]:
        """Update the table before transformers saves the model; the state dict is left to transformers."""
        if not getattr(model, "_hf_peft_config_loaded", False):  # then it saves adapters alone
            self.quantization_config.layers = stored_entries(model)
        return None, {}

    def dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Replace stored layers with stock layers, in place, and remove the quantization configuration.

        Experts are stored again as transformers stores them.

        Args:
            model: a compressed model, not offloaded.
            dtype: dtype to cast the whole model to; None keeps that of each layer.

        Raises:
            RocketError: a layer is offloaded.
        """
        if any(layer.offloaded for _, layer in stored_layers(model)):
            raise RocketError("a part of the model is offloaded; load it without offloading to dequantize it")
        restore_layers(model, dtype)
        fuse(model)
        if dtype is not None:
            model.to(dtype=dtype)  # type: ignore[call-arg]  # transformers hides the signature
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        return model

    def is_serializable(self) -> bool:
        """Return that `save_pretrained` works."""
        return True


def _stored_forms(files: Collection[str]) -> dict[str, _TensorForm]:
    """Return the tensors in safetensors files by name; none of files in another format."""
    found: dict[str, _TensorForm] = {}
    if any(Path(file).suffix != ".safetensors" for file in files):
        return found
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                parts = {key: tensors.get_slice(key) for key in tensors.keys()}  # noqa: SIM118 (no mapping)
                found |= {
                    key: _TensorForm(tuple(part.get_shape()), part.get_dtype() == "U8") for key, part in parts.items()
                }
        except SafetensorError as error:
            raise CorruptCheckpointError(f"{file} cannot be read ({error}); copy it again") from error
    return found


def _untie_stored(model: PreTrainedModel, names: Collection[str], stored: Container[str]) -> None:
    """Remove ties of layers that are stored separately, as heads of T5 may be, whose configuration always ties them.

    transformers removes these ties once it has loaded the weights; layers are replaced before.

    Args:
        model: the model.
        names: names in the files of the layers that are replaced.
        stored: names of all tensors in the files.
    """
    for target, source in [*model.all_tied_weights_keys.items()]:
        is_listed = any(key.removesuffix(".weight") in names for key in (target, source))
        if is_listed and target in stored and source in stored:
            del model.all_tied_weights_keys[target]


def _check_files(
    found: Mapping[str, _TensorForm], layers: Mapping[str, StoredLayer], prefix: str, left_out: Collection[str]
) -> None:
    """Check the files against the table; for a missing tensor transformers only warns and uses random numbers."""
    stems = set(left_out)
    for name, layer in layers.items() if found else ():
        candidates = with_and_without(prefix, name)
        stem = next((candidate for candidate in candidates if f"{candidate}.weight" in found), name)
        stems.add(stem)
        expected = {
            f"{stem}.{key}": _TensorForm(tuple(tensor.shape), tensor.dtype == torch.uint8)
            for key, tensor in layer.state_dict().items()
        }
        for key in {*(f"{stem}.{part}" for part in _PARTS), *expected}:
            if found.get(key) != expected.get(key):
                raise CorruptCheckpointError(
                    f"layer {name!r}: tensor {key} has {found.get(key, 'no shape')} in the files and "
                    f"{expected.get(key, 'no shape')} by config.json; copy the files again"
                )
    endings = tuple(f".{part}" for part in _PARTS)
    for stem in {key.rpartition(".")[0] for key in found if key.endswith(endings)} - stems:
        weight = found.get(f"{stem}.weight")
        if weight is not None and len(weight.shape) == 1:
            raise CorruptCheckpointError(
                f"layer {stem!r} is stored compressed, and config.json does not list it; copy the files again"
            )


def _register() -> None:
    # Reloading the module registers its new classes; classes of another package are not replaced.
    if getattr(AUTO_QUANTIZER_MAPPING.get(QUANT_METHOD), "__module__", None) == __name__:
        del AUTO_QUANTIZER_MAPPING[QUANT_METHOD], AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD]
    register_quantization_config(QUANT_METHOD)(RocketConfig)
    register_quantizer(QUANT_METHOD)(RocketHfQuantizer)


_register()
