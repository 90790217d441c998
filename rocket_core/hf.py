"""Loading and saving compressed models through transformers.

Importing this module teaches `from_pretrained` the quantization method `rocket`, once per process:

    import rocket_core.hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("path/to/artifact")

The artifact's `config.json` lists its factored layers by their names in the files, since transformers gives modules
other names than files in some families. To keep the coefficients packed in memory (smaller, slower), set
`config.quantization_config["keep_packed"] = True` and pass `config=config`.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from rocket_core.errors import (
    AlreadyQuantizedError,
    CheckpointFormatError,
    CorruptCheckpointError,
    InvalidConfigError,
    RocketError,
    UnsupportedArchitectureError,
)
from rocket_core.modules import (
    FORMAT_VERSION,
    QUANT_METHOD,
    FactorizedLinear,
    LayerFactors,
    layer_tensors,
)


class LayerEntry(TypedDict):
    """A factored layer in `config.json`: atoms and stored coefficients."""

    rank: int
    nnz: int


class RocketConfig(QuantizationConfigMixin):
    """The `quantization_config` of a compressed model.

    Attributes:
        layers: the factored layers, by their name in the checkpoint files.
        format_version: version of the disk format, at most `FORMAT_VERSION`.
        keep_packed: leave the coefficients packed in memory; written to disk only if set.
    """

    def __init__(
        self,
        layers: Mapping[str, Any] | None = None,
        format_version: Any = FORMAT_VERSION,
        keep_packed: bool = False,
        **unknown: Any,
    ) -> None:
        unknown.pop("quant_method", None)
        if not _is_count(format_version) or format_version > FORMAT_VERSION:
            raise CheckpointFormatError(
                f"the checkpoint has format version {format_version!r}; this rocket-compress reads up to "
                f"{FORMAT_VERSION}: upgrade it"
            )
        if unknown:
            raise CheckpointFormatError(f"quantization_config has keys that format 1 does not know: {sorted(unknown)}")
        self.quant_method: Any = QUANT_METHOD
        self.format_version: int = format_version
        self.keep_packed = keep_packed
        self.layers = {name: _checked_entry(name, entry) for name, entry in (layers or {}).items()}

    def to_dict(self) -> dict[str, Any]:
        """What stands in `config.json`."""
        layers = {name: dict(entry) for name, entry in self.layers.items()}
        config = {"quant_method": self.quant_method, "format_version": self.format_version, "layers": layers}
        return config | ({"keep_packed": True} if self.keep_packed else {})


class RocketHfQuantizer(HfQuantizer):
    """Puts `FactorizedLinear` in place of the layers that the table names, before transformers loads the weights."""

    requires_calibration = True  # refuses to quantize while loading
    quantization_config: RocketConfig
    _packed_share = 1.0

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        layers = self.quantization_config.layers
        packed = unpacked = _nbytes(model)
        factored = {}
        for name, (module_name, stock) in _find_modules(model, layers).items():
            layer = factored[name] = _empty_layer(stock, layers[name], name)
            extra = _nbytes(layer) - _nbytes(stock)
            packed += extra
            unpacked += extra + (layer.rank * layer.out_features - layer.nnz) * layer.weight_u.element_size()
            model.set_submodule(module_name, layer)
        self._packed_share = packed / unpacked if unpacked else 1.0
        _check_files(kwargs.get("checkpoint_files") or [], factored, model.base_model_prefix)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        if not self.quantization_config.keep_packed:
            # Offloaded layers are on the meta device here: they stay packed.
            layers = [layer for _, layer in _factored_layers(model) if not layer.weight_u.is_meta]
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                list(pool.map(FactorizedLinear.unpack_, layers))
        return model

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        """Leaves room for unpacking: transformers distributes the packed layers over the devices.

        Args:
            max_memory: bytes by device; transformers has turned sizes like "1GiB" into numbers.
        """
        share = 1.0 if self.quantization_config.keep_packed else self._packed_share
        return {device: int(limit * share) for device, limit in max_memory.items()}

    def get_state_dict_and_metadata(self, model: PreTrainedModel, *_: Any, **__: Any) -> tuple[None, dict[str, Any]]:
        """Brings the table up to date before transformers saves the model; the state dict is the model's own."""
        if not getattr(model, "_hf_peft_config_loaded", False):  # then it saves adapters alone
            self.quantization_config.layers = _table(model)
        return None, {}

    def dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Puts stock layers with the composed weights back, in place; the model no longer knows it was compressed.

        Args:
            model: a compressed model, not offloaded.
            dtype: cast the whole model to it; None leaves every layer its own.

        Raises:
            RocketError: a layer is offloaded.
        """
        layers = dict(_factored_layers(model))
        if any(layer.weight_u.is_meta for layer in layers.values()):
            raise RocketError("a part of the model is offloaded; load it without offloading to dequantize it")
        while layers:  # no factors are held longer than their layer stands
            name, layer = layers.popitem()
            model.set_submodule(name, _stock_layer(layer, dtype))
        if dtype is not None:
            model.to(dtype=dtype)  # type: ignore[call-arg]  # transformers hides the signature
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Whether `save_pretrained` works; earlier versions of transformers ask with an argument."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters may be trained."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Whether the factors themselves may be trained."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether `torch.compile` works."""
        return True


def attach_factors(model: PreTrainedModel, factors: Mapping[str, LayerFactors]) -> PreTrainedModel:
    """Replaces linear layers by their factors, in place, so that `save_pretrained` writes an artifact.

    Args:
        model: a model of plain weights, or one this function returned.
        factors: factors by module name; they take dtype and device of the weight they replace.

    Returns:
        The same model.

    Raises:
        InvalidConfigError: a name or shape does not fit the model.
        AlreadyQuantizedError: the model is quantized by another method.
        UnsupportedArchitectureError: transformers stores a layer under no name of its own.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not isinstance(quantizer, RocketHfQuantizer):
        raise AlreadyQuantizedError(f"{type(model).__name__} is quantized already; load its plain weights")
    disk_names(model, factors)
    layers = {name: _factored_layer(_linear(model, name), factors[name], name) for name in factors}
    for name, layer in layers.items():
        model.set_submodule(name, layer)
    config = RocketConfig(_table(model))
    marks = {  # those of `from_pretrained`
        "hf_quantizer": RocketHfQuantizer(config, pre_quantized=True),
        "quantization_method": QUANT_METHOD,
        "is_quantized": True,
    }
    for attribute, value in marks.items():
        setattr(model, attribute, value)
    model.config.quantization_config = config
    return model


def disk_names(model: PreTrainedModel, modules: Iterable[str]) -> dict[str, str]:
    """Names that `save_pretrained` gives to linear layers, by their names in the model.

    Raises:
        UnsupportedArchitectureError: transformers stores a layer together with others, or in pieces.
    """
    conversions = _conversions(model, saving=True)
    found = {}
    for name in modules:
        key = f"{name}.weight"
        for conversion in conversions:
            renamed, pattern = conversion.rename_source_key(key)
            if pattern is not None and hasattr(conversion, "operations"):
                raise UnsupportedArchitectureError(
                    f"layer {name!r} is stored as a part of {renamed!r} and cannot be stored factored; ignore it"
                )
            key = renamed
        found[name] = key.removesuffix(".weight")
    return found


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _checked_entry(name: str, entry: Any) -> LayerEntry:
    if not isinstance(entry, dict) or set(entry) != {"rank", "nnz"} or not all(map(_is_count, entry.values())):
        raise CheckpointFormatError(
            f"quantization_config: layer {name!r} must have a rank and an nnz, positive integers, and has {entry}"
        )
    return LayerEntry(rank=entry["rank"], nnz=entry["nnz"])


def _nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _factored_layers(model: nn.Module) -> Iterable[tuple[str, FactorizedLinear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, FactorizedLinear))


def _linear(model: nn.Module, name: str) -> nn.Linear | Conv1D | None:
    """The stock layer of that name; None if there is none. A subclass may do more than its weight says."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    return module if type(module) is nn.Linear or type(module) is Conv1D else None


def _features(stock: nn.Linear | Conv1D) -> tuple[int, int]:
    return (stock.nx, stock.nf) if isinstance(stock, Conv1D) else (stock.in_features, stock.out_features)


def _empty_layer(stock: nn.Linear | Conv1D, entry: LayerEntry, name: str) -> FactorizedLinear:
    """The packed layer for `stock`, without numbers."""
    d_in, d_out = _features(stock)
    if entry["nnz"] > entry["rank"] * d_out:
        raise CheckpointFormatError(
            f"quantization_config: layer {name!r} has {entry['nnz']} coefficients; rank {entry['rank']} and {d_out} "
            f"outputs leave room for {entry['rank'] * d_out}"
        )
    return FactorizedLinear(
        d_in,
        d_out,
        **entry,
        bias=stock.bias is not None,
        transposed=isinstance(stock, Conv1D),
        layer_name=name,
        device="meta",
        dtype=stock.weight.dtype,
    )


def _factored_layer(stock: nn.Linear | Conv1D | None, factors: LayerFactors, name: str) -> FactorizedLinear:
    """The unpacked layer for `stock`: its dtype, device, mode and bias; the weight of the factors."""
    if stock is None:
        raise InvalidConfigError(f"the model has no linear layer {name!r}")
    shape = (factors.dictionary.shape[0], factors.coefficients.shape[1])
    if shape != _features(stock):
        raise InvalidConfigError(f"layer {name!r} has {_features(stock)} inputs and outputs, its factors {shape}")
    tensors = {key: value.to(stock.weight.device) for key, value in layer_tensors(factors, stock.weight.dtype).items()}
    entry = LayerEntry(rank=factors.dictionary.shape[1], nnz=tensors["weight"].numel())
    layer = _empty_layer(stock, entry, name)
    layer.load_state_dict(tensors, strict=False, assign=True)
    layer.bias = stock.bias
    return layer.train(stock.training).unpack_()


def _stock_layer(layer: FactorizedLinear, dtype: torch.dtype | None) -> nn.Linear | Conv1D:
    """The inverse of `_factored_layer`; the layer's own dtype if none is given."""
    weight = layer.dense_weight(dtype)
    stock: nn.Linear | Conv1D
    with torch.device("meta"):
        if layer.transposed:
            stock = Conv1D(layer.out_features, layer.in_features)
        else:
            stock = nn.Linear(layer.in_features, layer.out_features)
    stock.weight = nn.Parameter(weight.T.contiguous() if layer.transposed else weight)
    stock.bias = layer.bias
    return stock.train(layer.training)


def _conversions(model: PreTrainedModel, *, saving: bool) -> list[Any]:
    """What transformers does to names (and tensors) between files and modules, first to last."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:  # before version 5, modules have the names of the files
        return []
    if not saving:
        return list(get_model_conversion_mapping(model))
    used = getattr(model, "_weight_conversions", None)  # those of `from_pretrained`
    if used is None:
        used = get_model_conversion_mapping(model, add_legacy=False)
        used = [conversion for conversion in used if not isinstance(conversion, PrefixChange)]
    return [conversion.reverse_transform() for conversion in reversed(used)]


def _find_modules(model: PreTrainedModel, names: Iterable[str]) -> dict[str, tuple[str, nn.Linear | Conv1D]]:
    """For each name of a layer in the files: its name in the model, and the stock layer.

    Raises:
        CheckpointFormatError: the model has no such linear layer.
    """
    conversions = _conversions(model, saving=False)
    found = {}
    for name in names:
        key = f"{name}.weight"
        for conversion in conversions:
            key, _ = conversion.rename_source_key(key)
        candidates = _with_and_without(model.base_model_prefix, name, key.removesuffix(".weight"))
        matches = ((candidate, _linear(model, candidate)) for candidate in candidates)
        match = next(((candidate, stock) for candidate, stock in matches if stock is not None), None)
        if match is None:
            raise CheckpointFormatError(
                f"config.json lists the layer {name!r}, and {type(model).__name__} has no such linear layer; "
                "check that config.json belongs to these weights"
            )
        found[name] = match
    return found


def _with_and_without(prefix: str, *names: str) -> list[str]:
    """The names, then without and with the prefix that a base model lacks and a model with a head has."""
    bare = [name.removeprefix(f"{prefix}.") for name in names]
    return [*names, *bare, *(f"{prefix}.{name}" for name in bare)]


def _table(model: PreTrainedModel) -> dict[str, LayerEntry]:
    layers = dict(_factored_layers(model))
    names = disk_names(model, layers)
    return {names[name]: LayerEntry(rank=layer.rank, nnz=layer.nnz) for name, layer in layers.items()}


def _check_files(files: Iterable[str], layers: Mapping[str, FactorizedLinear], prefix: str) -> None:
    """Holds the files against the table: transformers gives a missing tensor random numbers and a warning."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        if Path(file).suffix != ".safetensors":
            return
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118 (no mapping)
        except SafetensorError as error:
            raise CorruptCheckpointError(f"{file} cannot be read ({error}); copy it again") from error
    for name, layer in layers.items() if shapes else ():
        candidates = _with_and_without(prefix, name)
        stem = next((candidate for candidate in candidates if f"{candidate}.weight" in shapes), name)
        expected = {f"{stem}.{key}": tuple(tensor.shape) for key, tensor in layer.state_dict().items()}
        for key in {f"{stem}.weight_mask", *expected}:
            if shapes.get(key) != expected.get(key):
                raise CorruptCheckpointError(
                    f"layer {name!r}: tensor {key} has shape {shapes.get(key)} in the files and {expected.get(key)} by "
                    "config.json; copy the files again"
                )


def _register() -> None:
    # Reloading the module registers its new classes; another package's would not be ours to replace.
    if getattr(AUTO_QUANTIZER_MAPPING.get(QUANT_METHOD), "__module__", None) == __name__:
        del AUTO_QUANTIZER_MAPPING[QUANT_METHOD], AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD]
    register_quantization_config(QUANT_METHOD)(RocketConfig)
    register_quantizer(QUANT_METHOD)(RocketHfQuantizer)


_register()
