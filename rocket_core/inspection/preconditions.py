"""Checks of a compression against config.json and the safetensors headers alone. Loads no torch.

Only what is certain to fail is rejected here; the preflight of a run repeats these checks and adds the rest.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rocket_core import budget
from rocket_core.config import (
    BUILTIN_DATASET,
    HUB_DATASETS,
    PROFILE_RANK_NNZ_RATIOS,
    PROFILE_RATIOS,
    SYNTHETIC_DATASET,
    InputKind,
)
from rocket_core.errors import (
    AlreadyQuantizedError,
    InfeasibleBudgetError,
    InvalidConfigError,
    UnknownDatasetError,
    UnmatchedIgnoreError,
    UnsupportedArchitectureError,
)
from rocket_core.inspection.layer_names import (
    PREFIXES,
    advice_on_pattern,
    family_of,
    is_costly,
    name_matcher,
    possible_names,
)
from rocket_core.inspection.model_fields import check_fields
from rocket_core.inspection.safetensors_headers import WeightSummary, storage_dtype
from rocket_core.inspection.strict_json import Limits, is_field_name, parse_object

# Families that cannot be compressed and are requested by mistake: without one list of blocks (an encoder-decoder: two),
# with blocks that share weights or are run in unusual ways, or with an input that calibration cannot produce.
# Far from complete: preflight knows what the installed transformers can build.
UNSUPPORTED = frozenset(
    """
    albert clap clip convnext convnextv2 detr encodec flaubert fsmt funnel hubert ibert resnet sam sam2 seamless_m4t
    seamless_m4t_v2 segformer siglip siglip2 siglip2_vision_model speech_to_text speecht5 squeezebert swin vit_mae vits
    wav2vec2 wav2vec2-bert wavlm xlm xlnet xmod
    """.split()  # noqa: SIM905 - dozens of words in quotes are not a table that one can read
)

# Families that exist only as code next to their weights; families that transformers knows may include such code as
# well. Just as incomplete.
OWN_CODE_ONLY = frozenset(
    """
    aquila baichuan chatglm codeshell decilm internlm internlm2 internvl_chat moss openelm orion
    phi-msft qwen skywork stablelm_epoch telechat xverse yuan
    """.split()  # noqa: SIM905 - as above
)

DEFAULT_WINDOW_LENGTH = 1024

MAX_CONFIG_BYTES = 2**22
"""More than any config.json has; readers of a file must request one more byte to detect a larger one."""

# Real files have five levels, and some contain the names of 21,000 labels twice.
_CONFIG_LIMITS = Limits(depth=32, values=100_000)
# Checking one shape takes about a millisecond.
_MAX_SHAPES = 1024

Shape = tuple[int, int]
"""Input and output features of a layer."""


def parse_config(raw: bytes, model: str) -> dict[str, Any]:
    """Return the content of a config.json.

    Args:
        raw: the file.
        model: name of the model in messages.

    Raises:
        UnsupportedArchitectureError: the file is not a JSON object, is too large or too deep, or has a duplicate key.
    """
    if len(raw) > MAX_CONFIG_BYTES:
        raise UnsupportedArchitectureError(f"the config.json of {model} is too large to be one")
    try:
        return parse_object(raw, limits=_CONFIG_LIMITS)
    except ValueError as error:
        raise UnsupportedArchitectureError(
            f"the config.json of {model} cannot be read ({error}); replace it with the model's original one"
        ) from error


def check_config(config: Mapping[str, object], model: str) -> None:
    """Raise an error if a model's config.json shows that it cannot be compressed.

    Args:
        config: the content of the file.
        model: name of the model in messages.

    Raises:
        AlreadyQuantizedError: the weights are quantized or already compressed.
        UnsupportedArchitectureError: transformers does not have the model, it cannot be compressed, or a field has a
            value that no model can have.
    """
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        named = f" ({method})" if isinstance(method, str) and is_field_name(method) else ""
        raise AlreadyQuantizedError(
            f"{model} is already compressed or quantized{named}; start from the original floating-point weights"
        )
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise UnsupportedArchitectureError(
            f"the config.json of {model} has no model_type that transformers could know; architectures that bring "
            "their own code are not supported"
        )
    check_fields(config, model)
    if config.get("auto_map") and kind in OWN_CODE_ONLY:
        raise UnsupportedArchitectureError(
            f"{model} needs its own code, which is never loaded; only architectures of transformers are supported"
        )
    if kind in UNSUPPORTED:
        raise UnsupportedArchitectureError(
            f"{model} is of a family that cannot be compressed; decoders, encoders and encoder-decoders with lists of "
            "like blocks can, if they read text, images or log-mel features of audio"
        )


def input_kind(config: Mapping[str, object]) -> InputKind:
    """Return what a model reads, as far as config.json shows it; a run takes it from the model itself."""
    if "num_mel_bins" in config:
        return "audio"
    return "images" if "patch_size" in config and "vocab_size" not in config else "text"


def check_calibration(kind: InputKind, dataset: str, sequence_length: int | None, model: str) -> None:
    """Raise an error if the calibration data is of a different kind than the model reads.

    Args:
        kind: what the model reads.
        dataset: as in `CalibrationConfig.dataset`; anything that is neither a folder nor a known name counts as a text
            file.
        sequence_length: the requested length.
        model: name of the model in messages.

    Raises:
        UnknownDatasetError: the kinds differ; the message says what to specify.
        InvalidConfigError: the model reads images, which have no sequence length.
    """
    if kind == "images" and sequence_length is not None:
        raise InvalidConfigError(f"{model} reads images, which have no sequence length; leave it out")
    if _is_text(dataset) == (kind == "text"):
        return
    if kind == "text":
        raise UnknownDatasetError(
            f"{model} reads text, and the calibration data are not text; use {BUILTIN_DATASET!r}, one of "
            f"{', '.join(HUB_DATASETS)}, or a .txt or .jsonl file"
        )
    files = ".png and .jpg images" if kind == "images" else ".wav files (16-bit mono)"
    raise UnknownDatasetError(
        f"{model} reads {kind}, and the calibration data are text; give a folder of {files}, or {SYNTHETIC_DATASET!r}: "
        f"made-up {kind} that stand in for real ones at a cost in quality"
    )


def _is_text(dataset: str) -> bool:
    if dataset in (BUILTIN_DATASET, *HUB_DATASETS):
        return True
    return dataset != SYNTHETIC_DATASET and not Path(dataset).is_dir()


def check_weights(weights: WeightSummary, ratio: float, model: str) -> None:
    """Raise an error if a model's weights show that it cannot be compressed.

    Args:
        weights: summary of the safetensors headers.
        ratio: target compression ratio, [0, 1).
        model: name of the model in messages.

    Raises:
        AlreadyQuantizedError: most weights are not plain floating-point numbers.
        UnsupportedArchitectureError: the model has no blocks with weight matrices, or too many shapes of them.
        InfeasibleBudgetError: no layer's profile reaches the ratio.
    """
    if weights.dtype_bytes:
        storage_dtype(weights, model)
    shapes = {shape: count for shape, count in weights.block_shapes.items() if min(shape) > 0}
    if not shapes:
        raise UnsupportedArchitectureError(
            f"{model} has no repeated blocks with weight matrices, so that there is nothing to compress"
        )
    if len(shapes) > _MAX_SHAPES:
        raise UnsupportedArchitectureError(
            f"the weight matrices in the blocks of {model} have {len(shapes)} different shapes; models with more than "
            f"{_MAX_SHAPES} are not supported"
        )
    _check_ratio_of_any_selection(shapes, ratio)


def check_ignore(config: Mapping[str, object], weights: WeightSummary, patterns: Sequence[str], model: str) -> None:
    """Raise an error if an ignore pattern matches no layer, as far as can be told from the names in the files.

    Args:
        config: the content of config.json.
        weights: summary of the safetensors headers; at least one matrix in a block.
        patterns: glob patterns of layer names. Messages do not repeat them, but give the position of the pattern.
        model: name of the model in messages.

    Raises:
        UnmatchedIgnoreError: a pattern matches no layer; the message suggests a replacement.
    """
    if not patterns or not weights.matrices or family_of(config) not in PREFIXES:
        return
    stored = [name for name, _ in weights.matrices]
    # Left to the preflight, as are families that may name their layers differently.
    if is_costly(stored, patterns):
        return
    names = [name for layer in stored for name in possible_names(config, layer)]
    for position, pattern in enumerate(patterns):
        if not name_matcher((pattern,))(names):
            which = "the ignore pattern" if len(patterns) == 1 else f"ignore pattern {position + 1} of {len(patterns)}"
            raise UnmatchedIgnoreError(
                f"{which} matches no layer of {model}; {advice_on_pattern(stored, pattern)}", position=position
            )


def window_length(positions: int | None, requested: int | None) -> int:
    """Return the number of tokens per window of text.

    Args:
        positions: tokens that the model can attend to; None if unlimited.
        requested: the requested length; None takes 1024, or the model's context length if that is less.

    Raises:
        InvalidConfigError: the length is less than 2 tokens, or more than the model has positions for.
    """
    if requested is None:
        return DEFAULT_WINDOW_LENGTH if positions is None else min(DEFAULT_WINDOW_LENGTH, positions)
    if requested < 2:
        raise InvalidConfigError(f"sequence length is {requested}; a window needs at least 2 tokens")
    if positions is not None and requested > positions:
        raise InvalidConfigError(
            f"sequence length is {requested}, but the model attends to {positions} tokens at most; ask for no more"
        )
    return requested


def highest_ratio(layers: Collection[Shape]) -> float:
    """Return the highest compression ratio that is guaranteed to be reachable, rounded down to four digits.

    Args:
        layers: `(d_in, d_out)` of every selected layer; at least one.
    """
    total = sum(d_in * d_out for d_in, d_out in layers)
    return _rounded_ratio(sum(_fewest_kept(*shape)[1] for shape in layers), total)


def check_reachable(layers: Collection[Shape], ratio: float) -> None:
    """Raise an error if no choice of candidates reaches a ratio; which shapes a profile will hold is not known yet.

    Args:
        layers: `(d_in, d_out)` of every selected layer.
        ratio: target compression ratio, [0, 1).

    Raises:
        InfeasibleBudgetError: the ratio cannot be reached; names the nearest ratio that is guaranteed.
    """
    total = sum(d_in * d_out for d_in, d_out in layers)
    if sum(_fewest_kept(*shape)[0] for shape in layers) > budget.parameter_budget(total, ratio):
        raise _out_of_reach(sum(_fewest_kept(*shape)[1] for shape in layers), total, ratio)


def ratio_within(layers: Collection[Shape], target_bytes: int, *, itemsize: int, other_bytes: int) -> float:
    """Return the fraction of the layers' bytes to remove so that a model fits a size; 0 if it fits already.

    Args:
        layers: `(d_in, d_out)` of every selected layer; at least one.
        target_bytes: upper bound on the size of the model.
        itemsize: bytes of a number.
        other_bytes: lower bound on the bytes of the model without these layers.

    Raises:
        InfeasibleBudgetError: no choice of candidates is small enough; names the smallest size that is guaranteed.
    """
    total = sum(d_in * d_out for d_in, d_out in layers) * itemsize
    ratio = max(0.0, 1 - (target_bytes - other_bytes) / total)
    try:
        if ratio < 1:
            # The fraction of bytes removed cannot exceed that of parameters.
            check_reachable(layers, ratio)
            return ratio
    except InfeasibleBudgetError:
        pass
    nearest = highest_ratio(layers)
    raise InfeasibleBudgetError(
        f"{target_bytes} bytes are out of reach: what is not compressed takes {other_bytes}, and with the layers about "
        f"{other_bytes + math.ceil(total * (1 - nearest))} is the smallest that is certain to be reached",
        nearest_ratio=nearest,
    )


def _check_ratio_of_any_selection(shapes: Mapping[Shape, int], ratio: float) -> None:
    """Raise an error if a ratio cannot be reached, whichever of these weights are the compressible layers.

    If each layer keeps more than its share of the budget, so does every sum of layers. A weight may be stored in either
    orientation; the one that keeps less is used.
    """
    if any(_fewest_either_way(shape)[0] <= budget.parameter_budget(shape[0] * shape[1], ratio) for shape in shapes):
        return
    total = sum(count * shape[0] * shape[1] for shape, count in shapes.items())
    raise _out_of_reach(sum(count * _fewest_either_way(shape)[1] for shape, count in shapes.items()), total, ratio)


def _fewest_either_way(shape: Shape) -> tuple[int, int]:
    one, other = _fewest_kept(*shape), _fewest_kept(*reversed(shape))
    return min(one[0], other[0]), max(one[1], other[1])


@lru_cache(maxsize=4 * _MAX_SHAPES)
def _fewest_kept(d_in: int, d_out: int) -> tuple[int, int]:
    """Return the fewest parameters that a layer's profile may keep, and the fewest that it is guaranteed to offer."""
    kept = [
        [budget.kept_parameters(d_in, *shape) for shape in shapes]
        for shapes in (budget.candidate_shapes(d_in, d_out, ratio, PROFILE_RANK_NNZ_RATIOS) for ratio in PROFILE_RATIOS)
        if shapes
    ]
    dense = d_in * d_out
    return min(map(min, kept), default=dense), min(map(max, kept), default=dense)


def _rounded_ratio(kept: int, total: int) -> float:
    return int((1 - kept / total) * 10_000) / 10_000


def _out_of_reach(certain: int, total: int, ratio: float) -> InfeasibleBudgetError:
    nearest = _rounded_ratio(certain, total)
    return InfeasibleBudgetError(
        f"ratio {ratio} is out of reach: the selected layers can lose at most {nearest} of their parameters; ask "
        f"for {nearest} or less",
        nearest_ratio=nearest,
    )
