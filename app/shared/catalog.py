"""Models and calibration datasets in the operator's folders, which this server offers by name.

A client's name is compared with the entries of the folder; it never becomes part of a path.
"""

from pathlib import Path

from app.shared.requests import LOCAL
from app.shared.settings import Settings
from rocket_core.config import BUILTIN_DATASET, HUB_DATASETS, SYNTHETIC_DATASET
from rocket_core.errors import ModelNotFoundError, UnknownDatasetError

_DATASET_SUFFIXES = (".jsonl", ".txt")


def list_models(settings: Settings) -> list[str]:
    """Return the ids of the models in the models folder: its subfolders with a config.json."""
    return [LOCAL + path.name for path in _entries(settings.models_folder) if (path / "config.json").is_file()]


def list_calibrations(settings: Settings) -> list[str]:
    """Return the names of datasets: those known to the library, and the entries of the datasets folder."""
    local = [path for path in _entries(settings.datasets_folder) if _is_dataset(path)]
    return [BUILTIN_DATASET, *HUB_DATASETS, SYNTHETIC_DATASET, *(LOCAL + path.name for path in local)]


def find_local_model(settings: Settings, model_id: str) -> Path:
    """Return the folder of `local/NAME`.

    Raises:
        ModelNotFoundError: the models folder has no such model.
    """
    for path in _entries(settings.models_folder):
        if LOCAL + path.name == model_id and (path / "config.json").is_file():
            return path
    raise ModelNotFoundError("this server has no local model with this name; GET /models lists those it has")


def find_dataset(settings: Settings, dataset: str) -> str:
    """Return the dataset as the library takes it: a known name, or the path of a file or folder.

    Raises:
        UnknownDatasetError: the datasets folder has no such file or folder.
    """
    if not dataset.startswith(LOCAL):
        return dataset
    for path in _entries(settings.datasets_folder):
        if LOCAL + path.name == dataset and _is_dataset(path):
            return str(path)
    raise UnknownDatasetError(
        "this server has no calibration data with this name; GET /calibrations lists those it has"
    )


def _is_dataset(path: Path) -> bool:
    # A folder contains images or audio.
    return path.is_dir() or (path.suffix in _DATASET_SUFFIXES and path.is_file())


def _entries(folder: Path) -> list[Path]:
    # The folders are optional; without them nothing is offered, which is not an error.
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []
