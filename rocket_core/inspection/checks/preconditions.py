"""Checks of a compression against config.json and the safetensors headers alone. Loads no torch.

Only what is certain to fail is rejected here; the preflight of a run repeats these checks and adds the rest.
"""

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rocket_core.config import (
    BUILTIN_DATASET,
    HUB_DATASETS,
    SYNTHETIC_DATASET,
    CompressionConfig,
    InputKind,
)
from rocket_core.errors import (
    CheckpointFormatError,
    InvalidConfigError,
    UnknownDatasetError,
    UnmatchedIgnoreError,
    UnsupportedArchitectureError,
)
from rocket_core.inspection.checks.coded_weights import check_plain
from rocket_core.inspection.files.dataset_names import LOCAL_FILES, is_hub_dataset
from rocket_core.inspection.files.strict_json import Limits, parse_object
from rocket_core.inspection.files.text_rows import text_files
from rocket_core.inspection.headers.block_lists import has_tower
from rocket_core.inspection.headers.coded_tensors import coded_format
from rocket_core.inspection.headers.layer_names import (
    PREFIXES,
    advice_on_pattern,
    family_of,
    is_costly,
    name_matcher,
    possible_names,
    possible_table_names,
)
from rocket_core.inspection.headers.model_fields import check_fields, predicts_tokens
from rocket_core.inspection.headers.weight_summary import WeightSummary, storage_dtype

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

# Families of several models in one checkpoint, with the part that can be compressed.
_PARTS = {"qwen2_5_omni": "thinker", "qwen3_omni_moe": "thinker"}

# Families that exist only as code next to their weights; families that transformers knows may include such code as
# well. Just as incomplete.
OWN_CODE_ONLY = frozenset(
    """
    aquila baichuan chatglm codeshell decilm internlm internlm2 internvl_chat moss openelm orion
    phi-msft qwen skywork stablelm_epoch telechat xverse yuan
    """.split()  # noqa: SIM905 - as above
)

# Model types that transformers has for later checkpoints of families with their own code.
CONVERTED: Mapping[str, str] = {
    "chatglm": "glm",
    "internvl_chat": "internvl",
    "phi-msft": "phi",
    "stablelm_epoch": "stablelm",
}

# Any of them may be all that a tokenizer consists of.
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "spiece*", "sentencepiece*", "*.model")


DEFAULT_WINDOW_LENGTH = 1024
"""Tokens per window of an evaluation, and of healing."""
CALIBRATION_WINDOW_LENGTH = 256
"""Tokens per window of calibration: as many tokens in longer windows take longer and have fewer first tokens, which
carry most of the gradients. On SmolLM2 at 4 bits, 16,384 tokens in windows of 1,024 have 3 to 5 % more KL.
"""

MAX_CONFIG_BYTES = 2**22
"""More than any config.json has; readers of a file must request one more byte to detect a larger one."""

# Real files have five levels, and some contain the names of 21,000 labels twice.
_CONFIG_LIMITS = Limits(depth=32, values=100_000)
# Checking one shape takes about a millisecond.
MAX_SHAPES = 1024


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
        AlreadyQuantizedError: the weights are already compressed, or quantized in a way that is not read.
        UnsupportedArchitectureError: transformers does not have the model, it cannot be compressed, or a field has a
            value that no model can have.
    """
    coded_format(config, model)
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise UnsupportedArchitectureError(
            f"the config.json of {model} has no model_type that transformers could know; architectures that bring "
            "their own code are not supported"
        )
    check_fields(config, model)
    if config.get("auto_map") and kind in OWN_CODE_ONLY:
        known = CONVERTED.get(kind)
        advice = f"; transformers has the family as {known!r}, use a checkpoint of that model_type" if known else ""
        raise UnsupportedArchitectureError(
            f"{model} needs its own code, which is never loaded; only architectures of transformers are supported"
            + advice
        )
    if kind in _PARTS:
        raise UnsupportedArchitectureError(
            f"{model} holds several models with a decoder each, of which one can be compressed: the {_PARTS[kind]}; "
            f"give a checkpoint of that alone, which `model.{_PARTS[kind]}.save_pretrained(FOLDER)` writes"
        )
    if kind == "albert":
        raise UnsupportedArchitectureError(
            f"the layers of {model} share the weights of one block, and only models whose blocks have their own can be "
            "compressed"
        )
    if kind in UNSUPPORTED:
        raise UnsupportedArchitectureError(
            f"{model} is of a family that cannot be compressed; decoders, encoders and encoder-decoders with lists of "
            "like blocks can, if they read text, images or log-mel features of audio"
        )


def check_heals(config: Mapping[str, object], model: str) -> None:
    """Raise an error if config.json shows that a model does not predict next tokens, on which alone healing trains.

    Args:
        config: the content of config.json. If it names no class, that is not judged.
        model: name of the model in messages.

    Raises:
        UnsupportedArchitectureError: it does not predict tokens.
    """
    if not predicts_tokens(config):
        raise cannot_heal(model)


def cannot_heal(model: str) -> UnsupportedArchitectureError:
    """Return the error for a model that does not predict tokens."""
    return UnsupportedArchitectureError(f"{model} does not predict next tokens, and healing trains on nothing else")


def check_tokenizer(names: Collection[str], kind: InputKind, model: str) -> None:
    """Raise an error if a model that reads text comes without a tokenizer.

    Args:
        names: names of its files.
        kind: what it reads.
        model: name of the model in messages.

    Raises:
        CheckpointFormatError: there is no file of a tokenizer.
    """
    if kind == "text" and not any(fnmatchcase(name, pattern) for name in names for pattern in _TOKENIZER_FILES):
        raise CheckpointFormatError(
            f"{model} has no tokenizer, which turns calibration text into tokens; add the files of the model's own, "
            "such as tokenizer.json"
        )


def check_calibration(kind: InputKind, dataset: str, sequence_length: int | None, model: str) -> None:
    """Raise an error if the calibration data is of a different kind than the model reads.

    Args:
        kind: what the model reads.
        dataset: as in `CalibrationConfig.dataset`; anything that is neither a folder nor a known name counts as a text
            file, and a folder with text files fits any kind.
        sequence_length: the requested length.
        model: name of the model in messages.

    Raises:
        UnknownDatasetError: the kinds differ; the message says what to specify.
        InvalidConfigError: the model reads images, which have no sequence length.
    """
    if kind == "images" and sequence_length is not None:
        raise InvalidConfigError(f"{model} reads images, which have no sequence length; leave it out")
    if kind in _kinds_of(dataset):
        return
    if kind == "text":
        raise UnknownDatasetError(
            f"{model} reads text, and the calibration data are not text; use {BUILTIN_DATASET!r}, one of "
            f"{', '.join(HUB_DATASETS)}, namespace/name:split on the Hub, a {LOCAL_FILES} file, or a folder with .txt "
            "and .md files at its top level"
        )
    files = ".png and .jpg images" if kind == "images" else ".wav files (16-bit mono)"
    raise UnknownDatasetError(
        f"{model} reads {kind}, and the calibration data are text; give a folder of {files}, or {SYNTHETIC_DATASET!r}: "
        f"made-up {kind} that stand in for real ones at a cost in quality"
    )


def _kinds_of(dataset: str) -> tuple[InputKind, ...]:
    """Return what a data set may consist of."""
    if dataset == SYNTHETIC_DATASET:
        return "images", "audio"
    if dataset != BUILTIN_DATASET and not is_hub_dataset(dataset) and Path(dataset).is_dir():
        return ("text", "images", "audio") if text_files(Path(dataset)) else ("images", "audio")
    return ("text",)


def check_weights(weights: WeightSummary, model: str) -> None:
    """Raise an error if a model's weights show that it cannot be compressed.

    Args:
        weights: summary of the safetensors headers.
        model: name of the model in messages.

    Raises:
        AlreadyQuantizedError: weights are coded, or most of them are not plain floating-point numbers.
        UnsupportedArchitectureError: the model has no blocks with weight matrices, or too many shapes of them.
    """
    check_plain(weights, model)
    if weights.dtype_bytes:
        storage_dtype(weights, model)
    shapes = [shape for shape in weights.block_shapes if min(shape) > 0]
    if not shapes:
        raise UnsupportedArchitectureError(
            f"{model} has no repeated blocks with weight matrices, so that there is nothing to compress"
        )
    if len(shapes) > MAX_SHAPES:
        raise UnsupportedArchitectureError(
            f"the weight matrices in the blocks of {model} have {len(shapes)} different shapes; models with more than "
            f"{MAX_SHAPES} are not supported"
        )


def check_ignore(config: Mapping[str, object], weights: WeightSummary, patterns: Sequence[str], model: str) -> None:
    """Raise an error if an ignore pattern matches no layer and no token table, as far as names in the files tell.

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
    tables = possible_table_names(config)
    if is_costly([*stored, *tables], patterns):
        return
    names = [name for layer in stored for name in possible_names(config, layer)]
    names += tables
    for position, pattern in enumerate(patterns):
        if not name_matcher((pattern,))(names):
            which = "the ignore pattern" if len(patterns) == 1 else f"ignore pattern {position + 1} of {len(patterns)}"
            raise UnmatchedIgnoreError(
                f"{which} matches no layer of {model}; {advice_on_pattern(stored, pattern)}", position=position
            )


def check_vision(config: Mapping[str, object], compression: CompressionConfig, model: str) -> None:
    """Raise an error if the tower of a model without any is to be compressed.

    Args:
        config: the content of config.json.
        compression: the compression.
        model: name of the model in messages.

    Raises:
        InvalidConfigError: there is no tower.
    """
    if compression.includes_vision and not has_tower(config):
        raise InvalidConfigError(
            f"{model} has no tower that encodes images for a decoder; leave 'vision' out of include"
        )


def window_length(positions: int | None, requested: int | None, usual: int = DEFAULT_WINDOW_LENGTH) -> int:
    """Return the number of tokens per window of text.

    Args:
        positions: tokens that the model can attend to; None if unlimited.
        requested: the requested length; None takes the usual one, or the model's context length if that is less.
        usual: the usual length.

    Raises:
        InvalidConfigError: the length is less than 2 tokens, or more than the model has positions for.
    """
    if requested is None:
        return usual if positions is None else min(usual, positions)
    if requested < 2:
        raise InvalidConfigError(f"sequence length is {requested}; a window needs at least 2 tokens")
    if positions is not None and requested > positions:
        raise InvalidConfigError(
            f"sequence length is {requested}, but the model attends to {positions} tokens at most; ask for no more"
        )
    return requested
