"""Checks of a compression that need neither torch nor weights: for commands and services that should refuse at once."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from rocket_core.config import CompressionConfig
from rocket_core.errors import HubUnavailableError, ModelNotFoundError
from rocket_core.hub.repository import check_repository_id, find_repository
from rocket_core.inspection.checks.feasibility import check_feasible
from rocket_core.inspection.checks.media_lines import check_media
from rocket_core.inspection.checks.preconditions import (
    MAX_CONFIG_BYTES,
    check_calibration,
    check_config,
    check_heals,
    check_tokenizer,
    check_vision,
    parse_config,
    window_length,
)
from rocket_core.inspection.checks.prompts import check_loss_bounds, check_prompt_lengths, check_prompts, check_tasks
from rocket_core.inspection.files.dataset_names import local_path_of
from rocket_core.inspection.files.model_advice import advice_on_folder, advice_on_path, is_gguf_file
from rocket_core.inspection.files.model_files import CONFIG_NAME, check_adapter, read_start, vet_folder
from rocket_core.inspection.files.safetensors_headers import local_weight_files, read_header
from rocket_core.inspection.headers.coded_tensors import coded_format
from rocket_core.inspection.headers.model_fields import input_kind, positions
from rocket_core.inspection.headers.weight_summary import WeightSummary, summarize_files

_HUB_SECONDS = 60.0

FileSize = Callable[[Mapping[str, Any], WeightSummary, CompressionConfig, Path], int | None]
"""A function that returns the bytes of a file of the dense model, for `rocket_core.exports.gguf_size`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedModel:
    """A model that may be compressed, as far as config.json and headers tell.

    Attributes:
        settings: the content of config.json.
        weights: summary of the safetensors headers.
        commit: commit of its repository; None for a folder.
        dense_file_bytes: bytes of the GGUF file of the dense model, if it is asked for and known.
    """

    settings: Mapping[str, Any]
    weights: WeightSummary
    commit: str | None = None
    dense_file_bytes: int | None = None


def check_request(
    model: str, config: CompressionConfig, *, revision: str | None = None, file_size: FileSize | None = None
) -> None:
    """Raise the error that a compression would end with, as far as names, config.json and headers tell.

    Args:
        model: path of a folder or of a GGUF file, or repository id `namespace/name`; only folders are looked into.
        config: the compression.
        revision: branch, tag or commit of a repository.
        file_size: bytes of the GGUF file of a dense model; None leaves a bound on that.

    Raises:
        ModelNotFoundError: there is no such folder, and one with nearly this path; with a revision, the repository is
            meant.
        RocketError: as `rocket_core.compress` would raise it.
    """
    _check_names(config)
    folder = Path(model).expanduser()
    if folder.is_dir():
        _inspect_folder(folder, config, revision, file_size)
    elif not is_gguf_file(folder):
        check_is_repository(model, revision)


def check_is_repository(model: str, revision: str | None) -> None:
    """Raise an error if a text that is not the path of a folder seems to be a misspelled one.

    Args:
        model: the text.
        revision: branch, tag or commit; if given, the text is a repository.

    Raises:
        ModelNotFoundError: it is not a repository id either, or a folder has nearly this path.
    """
    check_repository_id(model)
    advice = None if revision is not None else advice_on_path(Path(model).expanduser())
    if advice is not None:
        sentence = advice if advice.endswith((".", "?")) else f"{advice}."
        raise ModelNotFoundError(
            f"there is no folder {model}; {sentence} To get the repository of this name from the Hub, add "
            "--revision main"
        )


def inspect_model(
    model: str,
    config: CompressionConfig,
    *,
    revision: str | None = None,
    token: str | None = None,
    file_size: FileSize | None = None,
) -> InspectedModel:
    """Check a compression in the same way, with the headers of a repository as well, and return what was read.

    Args:
        model: path of a folder, or repository id `namespace/name`.
        config: the compression.
        revision: branch, tag or commit of a repository.
        token: token for the Hub; None uses that of this machine's user, if any.
        file_size: as in `check_request`.

    Raises:
        RocketError: as `rocket_core.compress` would raise it.
        HubUnavailableError: the Hub is unreachable, or the model has too many headers.
    """
    _check_names(config)
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _inspect_folder(folder, config, revision, file_size)
    check_is_repository(model, revision)
    repository = find_repository(model, revision, token=token, seconds=_HUB_SECONDS)
    check_adapter(repository.files, model)
    settings = parse_config(repository.read_config(), model)
    check_settings(settings, config, model)
    check_data(settings, config, model)
    weights = repository.read_weights(settings)
    if weights is None:
        raise HubUnavailableError(f"{model} has too many headers to read from the Hub; download it and give its folder")
    check_headers(settings, weights, config, repository.files, model)
    return InspectedModel(settings=settings, weights=weights, commit=repository.commit)


def has_no_revision(folder: Path, revision: str) -> ModelNotFoundError:
    """Return the error for a revision of a model that is not on the Hub."""
    return ModelNotFoundError(f"{folder} is local and has no revision {revision!r}; leave revision out")


def check_settings(settings: Mapping[str, Any], config: CompressionConfig, model: str) -> None:
    """Raise an error if a model's config.json shows that it cannot be compressed, healed or asked as requested.

    Args:
        settings: the content of config.json.
        config: the compression.
        model: name of the model in messages.

    Raises:
        RocketError: the subclass names the problem.
    """
    check_config(settings, model)
    if config.heal_tokens is not None:
        check_heals(settings, model)
    if config.evaluate is not None:
        check_prompts(settings, config.evaluate.prompts, config.evaluate.answer_tokens, model)
        check_tasks(settings, config.evaluate.tasks, model)
    check_loss_bounds(settings, config.loss_bounds, model)


def check_data(
    settings: Mapping[str, Any],
    config: CompressionConfig,
    model: str,
    *,
    name: str | None = None,
    most_lines: int | None = None,
) -> None:
    """Raise an error if a model cannot be calibrated on the requested data.

    Args:
        settings: the content of config.json.
        config: the compression.
        model: name of the model in messages.
        name: name of the data in messages; None for their path.
        most_lines: how many lines of the data to read; None for all.

    Raises:
        RocketError: the subclass names the problem.
    """
    if not config.calibrates:
        return
    check_calibration(input_kind(settings), config.calibration.dataset, config.calibration.sequence_length, model)
    check_vision(settings, config, model)
    check_media(settings, config, model, name=name, most_lines=most_lines)


def check_headers(
    settings: Mapping[str, Any],
    weights: WeightSummary | None,
    config: CompressionConfig,
    files: Collection[str],
    model: str,
    *,
    dense_file_bytes: Callable[[], int | None] = lambda: None,
) -> None:
    """Raise an error if a model's weights, its context length or the names of its files do not allow a compression.

    Args:
        settings: the content of config.json, which passes `check_settings`.
        weights: summary of the safetensors headers; None if they are not known.
        config: the compression.
        files: names of the model's files.
        model: name of the model in messages.
        dense_file_bytes: see `check_feasible`.

    Raises:
        RocketError: the subclass names the problem.
    """
    if weights is not None:
        check_feasible(settings, weights, config, model, dense_file_bytes)
    longest = positions(settings)
    window_length(longest, config.calibration.sequence_length)
    if config.evaluate is not None:
        window_length(longest, config.evaluate.sequence_length)
    check_tokenizer(files, input_kind(settings), model)


def check_tokens(settings: Mapping[str, Any], config: CompressionConfig, folder: Path, model: str) -> None:
    """Raise an error if the tokenizer in a model's folder shows that a prompt is too long.

    Args:
        settings: the content of config.json, which passes `check_settings`.
        config: the compression.
        folder: the model's folder.
        model: name of the model in messages.

    Raises:
        InvalidConfigError: it is.
    """
    asked = config.evaluate
    if asked is not None:
        check_prompt_lengths(settings, asked.prompts, asked.answer_tokens, folder, model)


def read_settings(folder: Path, model: str) -> dict[str, Any]:
    """Return the content of the config.json of a folder.

    Raises:
        RocketError: the folder may not be opened, or the file cannot be read.
    """
    vet_folder(folder, model)
    return parse_config(read_start(folder, CONFIG_NAME, MAX_CONFIG_BYTES + 1), model)


def read_weights(folder: Path, model: str, settings: Mapping[str, Any] | None = None) -> WeightSummary:
    """Return a summary of the safetensors headers in a folder.

    Args:
        folder: the folder.
        model: name of the model in messages.
        settings: the content of config.json, which says how weights in few bits are stored; None for plain weights.

    Raises:
        RocketError: the folder has no such files, or they are damaged.
    """
    files = local_weight_files(folder, model)
    headers = (read_header(file, f"{model}/{file.name}") for file in files)
    return summarize_files(headers, model, coded_format(settings or {}, model))


def _check_names(config: CompressionConfig) -> None:
    local_path_of(config.calibration.dataset)
    if config.evaluate is not None:
        local_path_of(config.evaluate.dataset)


def _inspect_folder(
    given: Path, config: CompressionConfig, revision: str | None, file_size: FileSize | None
) -> InspectedModel:
    if revision is not None:
        raise has_no_revision(given, revision)
    folder = given.resolve()
    name = folder.name
    vet_folder(folder, name)
    if not (folder / CONFIG_NAME).is_file():
        raise ModelNotFoundError(f"{folder} has no config.json; {advice_on_folder(folder)}")
    settings = read_settings(folder, name)
    check_settings(settings, config, name)
    check_data(settings, config, name)
    weights = read_weights(folder, name, settings)
    known = cache(partial(file_size or (lambda *_: None), settings, weights, config, folder))
    files = [file.name for file in folder.iterdir()]
    check_headers(settings, weights, config, files, name, dense_file_bytes=known)
    check_tokens(settings, config, folder, name)
    return InspectedModel(settings=settings, weights=weights, dense_file_bytes=known())
