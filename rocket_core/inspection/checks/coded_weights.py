"""Schemes of weights that are stored as codes, known by the names and dtypes in the headers. Loads no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from rocket_core.errors import AlreadyQuantizedError
from rocket_core.inspection.files.safetensors_headers import TensorHeader
from rocket_core.inspection.headers.expert_stacks import is_stack_name
from rocket_core.inspection.headers.weight_summary import WeightSummary


class Scheme(StrEnum):
    """A way to code weights, in words; of several that a tensor's name or dtype allows, the first is meant."""

    ROCKET = "a compressed layer of Rocket"
    GPTQ = "integers packed by GPTQ"
    AWQ = "integers packed by AWQ"
    BITSANDBYTES_8 = "int8 of bitsandbytes"
    BITSANDBYTES_4 = "4-bit codes of bitsandbytes"
    AQLM = "codebooks of AQLM"
    HQQ = "integers packed by HQQ"
    QUANTO = "codes of quanto"
    TORCHAO = "codes of torchao"
    MXFP4 = "MXFP4, blocks of 4-bit floats with scales"
    NVFP4 = "NVFP4, blocks of 4-bit floats with scales of two levels"
    PACKED = "integers packed by compressed-tensors"
    FP8_INVERSE = "FP8 with scales of blocks or tensors (scale_inv)"
    FP8_SCALED = "FP8 with scales"
    INTEGERS_SCALED = "integers with scales"
    FLOATS_SCALED = "numbers with scales"
    SMALL_FLOATS = "floats of 8 or fewer bits without scales"
    INTEGERS = "integers"


# By the last part of a tensor's name.
_PARTS = {
    "g_idx": Scheme.GPTQ,
    "qweight": Scheme.AWQ,
    "qzeros": Scheme.AWQ,
    "SCB": Scheme.BITSANDBYTES_8,
    "absmax": Scheme.BITSANDBYTES_4,
    "quant_map": Scheme.BITSANDBYTES_4,
    "codebooks": Scheme.AQLM,
    "W_q": Scheme.HQQ,
    "_data": Scheme.QUANTO,
    "_weight_qdata": Scheme.TORCHAO,
    "weight_scale_2": Scheme.NVFP4,
    "weight_global_scale": Scheme.NVFP4,
    "weight_packed": Scheme.PACKED,
}
# What ModelOpt calls them in hf_quant_config.json.
_MODELOPT = {Scheme.FP8_SCALED: "FP8", Scheme.NVFP4: "NVFP4"}
_SCALES = ("_scale", "_scales", "_scale_inv")
_SMALL_FLOATS = ("F8_", "F6_", "F4")
_INTEGERS = ("I", "U")
_ORDER = {scheme: number for number, scheme in enumerate(Scheme)}


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedWeight:
    """A tensor that shows that weights are coded.

    Attributes:
        key: its name.
        dtype: safetensors name of its dtype.
        scheme: the scheme.
    """

    key: str
    dtype: str
    scheme: Scheme


def find_coded(weights: WeightSummary) -> CodedWeight | None:
    """Return a tensor that shows that weights of a checkpoint are coded, of its first scheme; None without any.

    Args:
        weights: summary of the safetensors headers.
    """
    return min(_coded(weights), key=lambda found: _ORDER[found.scheme], default=None)


def check_plain(weights: WeightSummary, model: str) -> None:
    """Raise an error if weights are coded that nothing would decode, as config.json does not describe them.

    Args:
        weights: summary of the safetensors headers.
        model: name of the model in messages.

    Raises:
        AlreadyQuantizedError: they are; the message names a tensor and the scheme.
    """
    found = find_coded(weights)
    if found is not None:
        raise AlreadyQuantizedError(
            f"{model} stores weights as {found.scheme} (tensor {found.key!r}, {found.dtype}), which the "
            "quantization_config in its config.json does not describe, so that codes would be taken for weights; "
            "restore the config.json that belongs to them, start from the original floating-point weights, or decode "
            "these with the library that wrote them"
            f"{_advice(found)}"
        )


def _advice(found: CodedWeight) -> str:
    """Return what to do about weights that ModelOpt may have described elsewhere than in config.json."""
    algorithm = _MODELOPT.get(found.scheme)
    if algorithm is None:
        return ""
    described = f'"quantization_config": {{"quant_method": "modelopt", "quant_algo": "{algorithm}"}}'
    return f". If hf_quant_config.json says that they are {algorithm} of ModelOpt, add {described} to config.json"


def _coded(weights: WeightSummary) -> Iterator[CodedWeight]:
    # The headers of what is known to be a plain matrix are not kept.
    names = {f"{name}.weight" for name, _ in weights.matrices} | {header.key for header in weights.others}
    for header in (header for header in weights.others if header.nbytes):
        scheme = _scheme(header, names)
        if scheme is not None:
            yield CodedWeight(key=header.key, dtype=header.dtype, scheme=scheme)


def _scheme(header: TensorHeader, names: set[str]) -> Scheme | None:
    last, is_matrix = header.key.rpartition(".")[2], len(header.shape) > 1
    has_scale = any(f"{header.key}{suffix}" in names for suffix in _SCALES)
    is_scale = any(header.key.removesuffix(suffix) in names for suffix in _SCALES if last.endswith(suffix))
    is_small = is_matrix and header.dtype.startswith(_SMALL_FLOATS)
    is_integer = is_matrix and header.dtype.startswith(_INTEGERS) and (last == "weight" or is_stack_name(last))
    rules = (
        (_is_of_rocket(header, last), Scheme.ROCKET),
        (last in _PARTS, _PARTS.get(last)),
        (last.endswith("_blocks") and f"{header.key.removesuffix('_blocks')}_scales" in names, Scheme.MXFP4),
        (last.endswith("_scale_inv"), Scheme.FP8_INVERSE),
        (is_small, Scheme.FP8_SCALED if has_scale else Scheme.SMALL_FLOATS),
        (is_integer, Scheme.INTEGERS_SCALED if has_scale else Scheme.INTEGERS),
        (is_scale, Scheme.FLOATS_SCALED),
    )
    return next((scheme for holds, scheme in rules if holds), None)


def _is_of_rocket(header: TensorHeader, last: str) -> bool:
    is_bytes = header.dtype == "U8" and len(header.shape) == 1
    return (is_bytes and last in ("weight", "weight_mask", "weight_u")) or (
        last == "weight_u" and len(header.shape) > 1
    )
