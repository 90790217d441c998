"""Models and calibration datasets in the operator's folders, which this server offers by name.

A client's name is compared with the entries of the folder; it never becomes part of a path.
"""

from dataclasses import dataclass
from pathlib import Path

from app.shared.requests import LOCAL
from app.shared.settings import Settings
from rocket_core.config import BUILTIN_DATASET, HUB_DATASETS, SYNTHETIC_DATASET
from rocket_core.errors import CheckpointFormatError, ModelNotFoundError, UnknownDatasetError
from rocket_core.inspection.files.model_advice import WEIGHT_SUFFIXES, advice_on_contents
from rocket_core.inspection.files.model_files import CONFIG_NAME, check_adapter
from rocket_core.inspection.files.text_rows import text_suffix


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundModel:
    """An entry of the models folder.

    Attributes:
        id: `local/NAME`.
        problem: what it is and what to do, if it cannot be compressed; None if it is a model.
    """

    id: str
    problem: str | None = None


def find_models(settings: Settings) -> list[FoundModel]:
    """Return the subfolders of the models folder, and files of weights in it, which alone do not make up models."""
    found = [path for path in _entries(settings.models_folder) if path.is_dir() or path.suffix in WEIGHT_SUFFIXES]
    return [FoundModel(id=LOCAL + path.name, problem=_problem(path)) for path in found]


def list_models(settings: Settings) -> list[str]:
    """Return the ids of the models in the models folder that can be compressed."""
    return [found.id for found in find_models(settings) if found.problem is None]


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
        if LOCAL + path.name == model_id:
            problem = _problem(path)
            if problem is not None:
                raise ModelNotFoundError(f"{model_id} is not a model that can be compressed: {problem}")
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


def _problem(path: Path) -> str | None:
    """Return what an entry of the models folder is instead of a model, without its place on this machine."""
    if not path.is_dir():
        return f"it is a file; {advice_on_contents([path.name])}"
    entries = _entries(path)
    names = [entry.name for entry in entries]
    try:
        check_adapter(names, "it")
    except CheckpointFormatError as error:
        return str(error)
    if (path / CONFIG_NAME).is_file():
        return None
    inner = next((entry.name for entry in entries if (entry / CONFIG_NAME).is_file()), None)
    if inner is not None:
        return f"the model is in its folder {inner}; move that folder up"
    return advice_on_contents(names)


def _is_dataset(path: Path) -> bool:
    # A folder contains texts, images or audio.
    return path.is_dir() or (text_suffix(path) is not None and path.is_file())


def _entries(folder: Path) -> list[Path]:
    # The folders are optional; without them nothing is offered, which is not an error.
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []
