"""Checks of a compression that need neither torch nor weights: for commands that should fail at once."""

from pathlib import Path

from rocket_core.config import CompressionConfig
from rocket_core.errors import ModelNotFoundError
from rocket_core.inspection.dataset_names import local_path_of
from rocket_core.inspection.feasibility import check_feasible
from rocket_core.inspection.hub import check_repository_id
from rocket_core.inspection.media_lines import check_media
from rocket_core.inspection.model_advice import advice_on_folder
from rocket_core.inspection.model_files import CONFIG_NAME, read_start, vet_folder
from rocket_core.inspection.preconditions import (
    MAX_CONFIG_BYTES,
    check_config,
    check_tokenizer,
    input_kind,
    parse_config,
)
from rocket_core.inspection.safetensors_headers import local_weight_files, read_header, sum_summaries, summarize


def check_request(model: str, config: CompressionConfig) -> None:
    """Raise the error that a compression would end with, as far as names, config.json and headers tell.

    Args:
        model: path of a folder, or repository id `namespace/name`, which is checked by its form only.
        config: the compression.

    Raises:
        RocketError: as `rocket_core.compress` would raise it.
    """
    local_path_of(config.calibration.dataset)
    if config.evaluate is not None:
        local_path_of(config.evaluate.dataset)
    folder = Path(model).expanduser()
    if not folder.is_dir():
        check_repository_id(model)
        return
    folder = folder.resolve()
    name = folder.name
    vet_folder(folder, name)
    if not (folder / CONFIG_NAME).is_file():
        raise ModelNotFoundError(f"{folder} has no config.json; {advice_on_folder(folder)}")
    settings = parse_config(read_start(folder, CONFIG_NAME, MAX_CONFIG_BYTES + 1), name)
    check_config(settings, name)
    files = local_weight_files(folder, name)
    weights = sum_summaries((summarize(read_header(file, f"{name}/{file.name}")) for file in files), name)
    check_feasible(settings, weights, config, name)
    check_media(settings, config, name)
    check_tokenizer([file.name for file in folder.iterdir()], input_kind(settings), name)
