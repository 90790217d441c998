"""Configuration, tokenizer and processors of a model folder, as transformers reads them.

The files are untrusted. Settings that would make transformers run code, access the Hub or open files elsewhere are
removed or rejected before transformers sees them, and exceptions that transformers and tokenizers raise while they
interpret the rest become errors of this library that name the file.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    PROCESSOR_MAPPING,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoTokenizer,
    FeatureExtractionMixin,
    GenerationConfig,
    ImageProcessingMixin,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from rocket_core.errors import (
    CalibrationError,
    CheckpointFormatError,
    InsufficientMemoryError,
    ModelNotFoundError,
    RocketError,
    UnsupportedArchitectureError,
)
from rocket_core.inspection.checks.preconditions import MAX_CONFIG_BYTES, parse_config
from rocket_core.inspection.files.model_advice import advice_on_version
from rocket_core.inspection.files.model_files import CONFIG_NAME, read_file, read_start
from rocket_core.inspection.files.normalizers import check_expansion
from rocket_core.inspection.files.unsafe_settings import check_redirections, without_code
from rocket_core.inspection.headers.model_fields import check_fields, problem_with_token
from rocket_core.system.time_limit import time_limit

_TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_TOKENIZER = "tokenizer.json"
_GENERATION = "generation_config.json"
_PROCESSOR_CONFIGS = ("preprocessor_config.json", "processor_config.json")
_MAX_TOKENIZER_BYTES = 2**29

_OURS, _THEIRS = "rocket_core", ("transformers", "tokenizers", "huggingface_hub")
_LONGEST_REASON = 300
# Settings of a model's outputs, which its files must not change.
_OUTPUTS = frozenset({"output_attentions", "output_hidden_states", "return_dict", "torchscript", "use_return_dict"})
_ADVICE = "replace it by the original"

# Processor time, far above that of real files on a slow machine: some tokenizers are converted when they are read.
TEMPLATE_SECONDS = 30.0
"""Processor time that a chat template or a processor may take for one message, image or recording."""
_TOKENIZER_SECONDS = 300.0
_CHARACTERS_PER_SECOND = 20_000


@contextmanager
def interpreting(
    subject: str,
    kind: type[RocketError] = CheckpointFormatError,
    *,
    seconds: float | None = None,
    advice: str = _ADVICE,
) -> Iterator[None]:
    """Convert exceptions that transformers and tokenizers raise on untrusted files to an error of this library.

    Exceptions from our own code, called by them or not, pass through unchanged, so that bugs are not hidden.

    Args:
        subject: names the file or model in messages.
        kind: class of the error.
        seconds: processor time that this may take, see `time_limit`; None means no limit.
        advice: what to do, for messages.

    Raises:
        RocketError: an error of class `kind`.
        InsufficientMemoryError: reading the files takes more memory than is available.
    """
    late = kind(f"{subject} took more than {seconds or 0:.0f} seconds of processor time, and was stopped; {advice}")
    try:
        with nullcontext() if seconds is None else time_limit(seconds, late):
            yield
    except (RocketError, torch.OutOfMemoryError):
        raise
    except MemoryError as error:
        raise InsufficientMemoryError(
            f"memory ran out while transformers read {subject}; use a machine with more, or check the sizes in it"
        ) from error
    except Exception as error:
        if _is_ours(error.__traceback__):
            raise
        raise _refusal(subject, kind, error, advice) from error
    except BaseException as error:
        # A panic in Rust code raises a class that is not an `Exception` and cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise _refusal(subject, kind, error, advice) from error


def load_config(folder: Path) -> PreTrainedConfig:
    """Read `config.json`. No code from the folder is run, and references to kernels on the Hub are removed.

    Args:
        folder: checkpoint folder.

    Raises:
        ModelNotFoundError: config.json does not exist.
        UnsupportedArchitectureError: the installed transformers does not know the architecture, or cannot read the
            file.
        CheckpointFormatError: the file refers to files elsewhere.
    """
    if not (folder / CONFIG_NAME).is_file():
        raise ModelNotFoundError(f"{folder} has no {CONFIG_NAME}; give the folder of a transformers checkpoint")
    name = str(folder / CONFIG_NAME)
    fields = parse_config(read_start(folder, CONFIG_NAME, MAX_CONFIG_BYTES + 1), str(folder))
    check_redirections(fields, name)
    check_fields(fields, str(folder))
    fields = {key: _with_floats(value) for key, value in without_code(fields).items() if key not in _OUTPUTS}
    family = fields.get("model_type")
    if family == "mistral" and "layer_types" in fields:
        # As in `AutoConfig`.
        family = "ministral"
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        what = f"the model type {_shown(family)}" if family else "no model_type"
        advice = advice_on_version(fields.get("transformers_version"), transformers.__version__)
        raise UnsupportedArchitectureError(
            f"the installed transformers cannot read {name}: it names {what}. {advice}Architectures that bring their "
            "own code are not supported"
        )
    with interpreting(name, UnsupportedArchitectureError):
        known: type[PreTrainedConfig] = CONFIG_MAPPING[family]
        config = known.from_dict(fields | {"model_type": family}, name_or_path=str(folder))
        # Check settings added by the class as well.
        check_redirections(config.to_dict(), name)
    return config


def _with_floats(value: Any) -> Any:
    """Return a value of config.json with infinities and NaN in place of the objects that transformers writes."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"]) if value["__float__"] in ("Infinity", "-Infinity", "NaN") else value
        return {key: _with_floats(part) for key, part in value.items()}
    return [_with_floats(part) for part in value] if isinstance(value, list) else value


def load_tokenizer(folder: Path, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a model.

    Args:
        folder: checkpoint folder.
        config: its configuration, from `load_config`.

    Raises:
        CheckpointFormatError: the tokenizer is missing, transformers cannot read it, or not in time, a file refers to
            files elsewhere, or the normalizer can make a text many times as long.
    """
    with interpreting(f"the tokenizer of {folder}", seconds=_TOKENIZER_SECONDS):
        settings = _read_json(folder, _TOKENIZER_CONFIG)
        for declared in (settings.get("tokenizer_class"), getattr(config, "tokenizer_class", None)):
            _check_class(declared, PreTrainedTokenizerBase, f"{folder / _TOKENIZER_CONFIG}: tokenizer_class")
        overrides = _without_paths(settings, folder)
        for key in _paths(_read_json(folder, _SPECIAL_TOKENS)):
            raise CheckpointFormatError(f"{folder / _SPECIAL_TOKENS}: {key} is not a special token; remove it")
        check_expansion(_read_json(folder, _TOKENIZER), str(folder / _TOKENIZER))
        tokenizer = AutoTokenizer.from_pretrained(
            folder, config=config, local_files_only=True, trust_remote_code=False, **overrides
        )
        longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, int | float) or not longest >= 1:
        raise CheckpointFormatError(
            f"{folder / _TOKENIZER_CONFIG}: model_max_length is not a number of tokens; correct or remove it"
        )
    loaded: PreTrainedTokenizerBase = tokenizer
    return loaded


def check_settings(folder: Path) -> None:
    """Validate files that a compression only copies, but that are needed to load the model.

    Args:
        folder: checkpoint folder.

    Raises:
        CheckpointFormatError: transformers cannot read a file, or would fail when it generates.
    """
    for file in _PROCESSOR_CONFIGS:
        _read_json(folder, file)
    generation = _read_json(folder, _GENERATION)
    stops = generation.get("eos_token_id")
    problem = None if stops is None else problem_with_token(stops)
    if problem is not None:
        raise CheckpointFormatError(f"{folder / _GENERATION}: eos_token_id is {problem}; {_ADVICE}")
    if generation:
        with interpreting(str(folder / _GENERATION)):
            GenerationConfig.from_pretrained(folder, local_files_only=True)


def load_processor(reader: Any, what: str, folder: Path, **options: Any) -> Any:
    """Read the image processor or feature extractor of a model.

    Args:
        reader: the Auto class that reads it.
        what: name of the processor in messages.
        folder: checkpoint folder.
        options: options for the reader.

    Raises:
        CheckpointFormatError: the folder has no processor that transformers can read.
    """
    with interpreting(f"the {what} of {folder}"):
        for file in _PROCESSOR_CONFIGS:
            for key, value in _class_names(_read_json(folder, file)):
                kinds = (FeatureExtractionMixin, ImageProcessingMixin)
                _check_class(value, kinds, f"{folder / file}: {key}")
        return reader.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **options)


def load_media_processor(
    folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, medium: Literal["image", "audio"]
) -> Any:
    """Read the processor of a model that reads text with images or audio. It cannot read videos.

    Args:
        folder: checkpoint folder.
        config: its configuration, from `load_config`.
        tokenizer: its tokenizer, from `load_tokenizer`.
        medium: what it has to read.

    Raises:
        CheckpointFormatError: the folder has no processor that transformers can read.
        CalibrationError: it needs a library that is not installed.
    """
    what = {"image": "images", "audio": "audio"}[medium]
    if not any((folder / file).is_file() for file in _PROCESSOR_CONFIGS):
        raise CheckpointFormatError(
            f"{folder} has neither {' nor '.join(_PROCESSOR_CONFIGS)}, which reading {what} needs; copy them from the "
            "original model, or calibrate on text alone"
        )
    settings = _read_json(folder, "processor_config.json")
    kind: Any = PROCESSOR_MAPPING.get(type(config), None) or _named_processor(settings)
    if kind is None:
        raise CheckpointFormatError(
            f"the installed transformers has no processor for {config.model_type} models; calibrate on text alone"
        )
    readers: dict[str, Callable[[], Any]] = {
        # Results must not depend on which libraries are installed.
        "image_processor": lambda: load_processor(AutoImageProcessor, "image processor", folder, backend="pil"),
        "feature_extractor": lambda: load_processor(AutoFeatureExtractor, "feature extractor", folder),
        "tokenizer": lambda: tokenizer,
        "video_processor": lambda: None,
    }
    with interpreting(f"the processor of {folder}"):
        names = kind.get_attributes()
        unknown = [name for name in names if name not in readers]
        if unknown:
            raise CheckpointFormatError(
                f"the processor of {config.model_type} models has a {unknown[0]}, which is not supported; calibrate on "
                "text alone"
            )
        settings["chat_template"] = tokenizer.chat_template
        try:
            return _without_videos(kind).from_args_and_dict([readers[name]() for name in names], settings)
        except ImportError as error:
            raise CalibrationError(f"reading {what} for {config.model_type} models: {error}") from error


def _named_processor(settings: Mapping[str, Any]) -> type[ProcessorMixin] | None:
    """Return the processor that a configuration names; a part of a model has none by its own type."""
    name = settings.get("processor_class")
    found = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
    return found if isinstance(found, type) and issubclass(found, ProcessorMixin) else None


def _without_videos(kind: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """Return a class of processors that may lack the one of videos, which needs further libraries."""

    class Processor(kind):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor" and argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    return Processor


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str | list[str], **options: Any) -> Any:
    """Call a tokenizer.

    Args:
        tokenizer: the model's tokenizer.
        text: a document, or several.
        options: options for the tokenizer.

    Raises:
        CheckpointFormatError: the tokenizer cannot process this text, or not in time.
    """
    characters = len(text) if isinstance(text, str) else sum(map(len, text))
    with using(tokenizer, characters):
        return tokenizer(text, **options)


def using(tokenizer: PreTrainedTokenizerBase, characters: int) -> AbstractContextManager[None]:
    """Return a context in which a tokenizer reads or writes a text of some length, see `interpreting`."""
    subject = f"the tokenizer of {tokenizer.name_or_path or 'the model'}"
    return interpreting(subject, seconds=TEMPLATE_SECONDS + characters / _CHARACTERS_PER_SECOND)


def _read_json(folder: Path, file: str) -> dict[str, Any]:
    if not (folder / file).is_file():
        return {}
    limit = _MAX_TOKENIZER_BYTES if file == _TOKENIZER else 2**24
    try:
        content = json.loads(read_file(folder, file, limit=limit))
    except (ValueError, RecursionError) as error:
        raise CheckpointFormatError(f"{folder / file} is not valid JSON; replace it by the original") from error
    if not isinstance(content, dict):
        raise CheckpointFormatError(f"{folder / file} is not a JSON object; replace it by the original")
    return content


def _paths(settings: Mapping[str, Any]) -> list[str]:
    """Return settings that would make a tokenizer open a file of that name at any location."""
    return [
        key
        for key, value in settings.items()
        if isinstance(value, str) and (key.endswith(("_file", "_files", "_path")) or key in ("vocab", "merges"))
    ]


def _without_paths(settings: Mapping[str, Any], folder: Path) -> dict[str, None]:
    """Return arguments that make a tokenizer read its files from its folder only, regardless of its settings."""
    file = folder / _TOKENIZER_CONFIG
    if settings.get("init_inputs"):
        raise CheckpointFormatError(f"{file}: init_inputs are not supported; remove them")
    versions = settings.get("fast_tokenizer_files") or []
    if not isinstance(versions, list) or any(Path(str(version)).name != version for version in versions):
        raise CheckpointFormatError(f"{file}: fast_tokenizer_files names files elsewhere; remove it")
    return dict.fromkeys(key for key in _paths(settings) if key != "name_or_path")


def _class_names(settings: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for key, value in settings.items():
        if key in ("image_processor_type", "feature_extractor_type"):
            yield key, value
        elif isinstance(value, dict):
            yield from _class_names(value)


def _check_class(name: object, kind: type | tuple[type, ...], where: str) -> None:
    """Reject a class name that would make transformers load something of another kind, such as a whole model."""
    if name is None:
        return
    if not isinstance(name, str):
        raise CheckpointFormatError(f"{where} is not a name of a class; correct or remove it")
    candidate = getattr(transformers, name, None) if name.isidentifier() else None
    # If a library is missing, transformers has a placeholder that raises an error when used.
    if candidate is None or type(candidate).__name__ == "DummyObject":
        return
    if not isinstance(candidate, type) or not issubclass(candidate, kind):
        raise CheckpointFormatError(f"{where} names {_shown(name)}, which is of another kind; correct or remove it")


def _is_ours(traceback: TracebackType | None) -> bool:
    """Return whether the innermost frame that belongs to `_OURS` or `_THEIRS` belongs to `_OURS`."""
    modules: list[str] = []
    while traceback is not None:
        modules.append(str(traceback.tb_frame.f_globals.get("__name__", "")).partition(".")[0])
        traceback = traceback.tb_next
    return next((module == _OURS for module in reversed(modules) if module in (_OURS, *_THEIRS)), True)


def _refusal(subject: str, kind: type[RocketError], error: BaseException, advice: str) -> RocketError:
    lines = [line.strip() for line in str(error).strip().splitlines()[:2]]
    reason = " ".join(line for line in lines if line).rstrip(".")
    if not isinstance(error, ValueError | OSError | ImportError) or not reason:
        reason = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    reason = "".join(character if character.isprintable() else "?" for character in reason)
    return kind(f"the installed transformers cannot read {subject}: {reason[:_LONGEST_REASON]}; {advice}")


def _shown(value: object) -> str:
    return repr(value)[:100]
