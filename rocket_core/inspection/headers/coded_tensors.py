"""Weights in few bits that can be decoded, as config.json describes them and headers show them. Loads no torch."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rocket_core.errors import AlreadyQuantizedError, CorruptCheckpointError
from rocket_core.inspection.files.safetensors_headers import TensorHeader
from rocket_core.inspection.files.strict_json import is_field_name
from rocket_core.inspection.headers.coding_schemes import PACKED_BITS, SCHEMES, Parts, Scheme

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# No known model has more than a few.
_MAX_GROUPS = 64
_NUMBER = re.compile(r"\.layers\.([0-9]{1,6})\.")
_UNSPECIFIED = "of a kind that is not known"
# Last parts of the names of tensors that only arithmetic in few bits needs: scales of activations and of the cache.
_UNUSED = frozenset(
    """
    activation_scale activation_scale_ub input_scale input_global_scale input_scale_ub input_zero_point k_scale
    output_scale output_zero_point q_scale v_scale weight_format
    """.split()  # noqa: SIM905 - a table of names
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedTensor(TensorHeader):
    """A weight in few bits, as it is once decoded; `start` and `stop` are those of its codes.

    Attributes:
        scheme: the scheme.
        parts: the tensors in the file.
        options: what config.json says about the codes.
    """

    scheme: Scheme
    parts: Parts
    options: Mapping[str, Any]

    @property
    def file_bytes(self) -> int:
        """Bytes of all of its tensors in the files."""
        return sum(part.nbytes for part in self.parts.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedFormat:
    """How a checkpoint stores weights in few bits.

    Attributes:
        title: the format in words.
        schemes: schemes of its weights.
        options: what config.json says about the codes; several where groups of layers differ.
        dtype: safetensors name of the dtype in which the model computes.
        blocks: the model's blocks, after which others follow that predict further tokens and that transformers does not
            run, as in DeepSeek-V3; None if none follow.
    """

    title: str
    schemes: tuple[Scheme, ...]
    options: tuple[Mapping[str, Any], ...]
    dtype: str
    blocks: int | None = None

    @property
    def is_approximation(self) -> bool:
        """Whether such a checkpoint is usually made from one in more bits."""
        return any(scheme.is_approximation for scheme in self.schemes)

    def decoded(self, headers: Iterable[TensorHeader], model: str) -> list[TensorHeader]:
        """Return the tensors of a checkpoint with coded weights as they are once decoded, a `CodedTensor` each.

        Left out are tensors that only arithmetic in few bits needs, and blocks that transformers does not run.

        Args:
            headers: all tensors.
            model: name of the model in messages.

        Raises:
            AlreadyQuantizedError: no weight is coded, or the order in which inputs were quantized is stored, which is
                not read.
            CorruptCheckpointError: the tensors of a weight do not fit together, or not what config.json says.
        """
        by_name = {header.key: header for header in headers}
        found: list[TensorHeader] = []
        taken: set[str] = set()
        for header in by_name.values():
            possible = (self._coded(header, by_name, scheme, model) for scheme in self.schemes)
            coded = next((coded for coded in possible if coded is not None), None)
            if coded is not None:
                found.append(coded)
                taken.update(part.key for part in coded.parts.values())
        if not found:
            raise AlreadyQuantizedError(
                f"{model} stores no weight as its config.json says ({self.title}); restore the config.json that "
                "belongs to these weights, or remove quantization_config if they are plain floating-point numbers"
            )
        plain = (header for key, header in by_name.items() if key not in taken)
        used = [*(header for header in plain if header.key.rpartition(".")[2] not in _UNUSED), *found]
        return [header for header in used if self.blocks is None or _block(header.key) < self.blocks]

    def _coded(self, header: TensorHeader, headers: Parts, scheme: Scheme, model: str) -> CodedTensor | None:
        parts = scheme.parts(header, headers)
        if parts is None:
            return None
        base = header.key.removesuffix(scheme.codes)
        if scheme.codes == "_packed" and f"{base}_g_idx" in headers:
            raise AlreadyQuantizedError(
                f"{model} stores an order of inputs ({base}_g_idx), with which compressed-tensors packs weights but "
                "does not read them; start from the original floating-point weights"
            )
        fits = [(shape, options) for options in self.options if (shape := scheme.shape(parts, options)) is not None]
        if len(fits) != 1:
            shapes = ", ".join(f"{part.key} {part.dtype} {part.shape}" for part in parts.values())
            raise CorruptCheckpointError(
                f"{model}: {len(fits)} of {len(self.options)} descriptions in quantization_config fit the tensors of a "
                f"weight ({shapes}); restore the config.json that belongs to these weights"
            )
        shape, options = fits[0]
        return CodedTensor(
            key=f"{base}{scheme.weight}",
            dtype=self.dtype,
            shape=shape,
            start=header.start,
            stop=header.stop,
            scheme=scheme,
            parts=parts,
            options=options,
        )


def coded_format(config: Mapping[str, Any], model: str) -> CodedFormat | None:
    """Return how a checkpoint stores weights in few bits, by its config.json; None if it does not say that.

    Args:
        config: the content of config.json.
        model: name of the model in messages.

    Raises:
        AlreadyQuantizedError: in a way that is not read; the message names it.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    settings: Mapping[str, Any] = quantization if isinstance(quantization, Mapping) else {}
    method = settings.get("quant_method")
    named = _shown(method)
    if method == "compressed-tensors":
        methods, options = _compressed_tensors(settings, model)
    else:
        methods, options = (str(_variant(settings)),), (settings,)
    schemes = tuple(scheme for scheme in SCHEMES if scheme.method in methods)
    if len(schemes) < len(methods):
        raise refused_format(model, named)
    title = f"{named} ({', '.join(methods)})" if method == "compressed-tensors" else named
    blocks = config.get("num_hidden_layers") if config.get("num_nextn_predict_layers") else None
    return CodedFormat(
        title=title,
        schemes=schemes,
        options=options,
        dtype=_compute_dtype(config),
        blocks=blocks if type(blocks) is int else None,
    )


def refused_format(model: str, named: str) -> AlreadyQuantizedError:
    """Return the error for a model whose weights are coded in a way that is not read."""
    return AlreadyQuantizedError(
        f"{model} is already compressed or quantized ({named}), in a way that Rocket does not read; start from the "
        "original floating-point weights"
    )


def _block(key: str) -> int:
    """Return the number of the block that a tensor belongs to; -1 for none."""
    found = _NUMBER.search(key)
    return int(found[1]) if found else -1


def _variant(settings: Mapping[str, Any]) -> object:
    """Return the method of a description other than of compressed-tensors, or None if it is a variant not read."""
    method = settings.get("quant_method")
    readable = {
        "gptq": settings.get("bits") in PACKED_BITS,
        "awq": settings.get("bits") == 4 and settings.get("version", "gemm") == "gemm",
        "bitsandbytes": settings.get("load_in_8bit") is True and not settings.get("load_in_4bit"),
        "modelopt": settings.get("quant_algo") in ("FP8", "NVFP4"),
    }
    return method if readable.get(str(method), True) else None


def _compressed_tensors(
    settings: Mapping[str, Any], model: str
) -> tuple[tuple[str, ...], tuple[Mapping[str, Any], ...]]:
    """Return the formats of a description of compressed-tensors, and the distinct descriptions of weights."""
    groups = settings.get("config_groups")
    described = list(groups.values()) if isinstance(groups, Mapping) else []
    sparsity = settings.get("sparsity_config")
    is_sparse = isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense"
    if is_sparse or settings.get("transform_config"):
        raise refused_format(model, "compressed-tensors with sparse or transformed weights")
    if not 0 < len(described) <= _MAX_GROUPS:
        raise refused_format(model, f"compressed-tensors with {len(described)} config_groups")
    formats: dict[str, None] = {}
    options: list[Mapping[str, Any]] = []
    for group in described:
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        name = group.get("format") or settings.get("format")
        formats[_shown(name)] = None
        if weights not in options:
            options.append(weights)
    unknown = [name for name in formats if name not in {scheme.method for scheme in SCHEMES}]
    if unknown or not options:
        raise refused_format(model, f"compressed-tensors, format {unknown[0] if unknown else _UNSPECIFIED}")
    return tuple(formats), tuple(options)


def _shown(name: object) -> str:
    """Return the name of a method or format as messages may repeat it."""
    return name if isinstance(name, str) and is_field_name(name.replace("-", "_")) else _UNSPECIFIED


def _compute_dtype(config: Mapping[str, Any]) -> str:
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            named = part.get(key)
            if isinstance(named, str) and named in _DTYPES:
                return _DTYPES[named]
    return "BF16"
