"""Names of data sets and files of calibration data. Loads no torch."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from rocket_core.config import BUILTIN_DATASET, HUB_DATASETS, SYNTHETIC_DATASET
from rocket_core.errors import UnknownDatasetError
from rocket_core.inspection.files.text_rows import TABLE_SUFFIXES, TEXT_SUFFIXES, text_suffix

LOCAL_FILES = f"{', '.join((*TEXT_SUFFIXES, *TABLE_SUFFIXES[:-1]))} or {TABLE_SUFFIXES[-1]}"
"""Suffixes of local files, for messages."""

_NAME = "[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_HUB_NAME = re.compile(rf"({_NAME}/{_NAME})(?:/({_NAME}))?:({_NAME})")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubDatasetName:
    """The name of a data set on the Hub, `namespace/name:split` or `namespace/name/config:split`.

    Attributes:
        repository: `namespace/name`.
        config: configuration; None if there is only one.
        split: its split.
    """

    repository: str
    config: str | None
    split: str


def hub_dataset_name(dataset: str) -> HubDatasetName | None:
    """Return the parts of `namespace/name:split`; None for other names."""
    found = _HUB_NAME.fullmatch(dataset)
    if found is None or "--" in found[1] or ".." in dataset:
        return None
    return HubDatasetName(repository=found[1], config=found[2], split=found[3])


def is_hub_dataset(dataset: str) -> bool:
    """Return whether a data set comes from the Hub."""
    return dataset in HUB_DATASETS or hub_dataset_name(dataset) is not None


def local_path_of(dataset: str) -> Path | None:
    """Return the path if a data set is a local file or folder; also a way to reject a wrong choice early.

    Args:
        dataset: as in `CalibrationConfig.dataset`. Names take precedence over files.

    Returns:
        The file or folder, or None for a name.

    Raises:
        UnknownDatasetError: not a known name, an existing file of those kinds, or a folder.
    """
    known = (BUILTIN_DATASET, *HUB_DATASETS, SYNTHETIC_DATASET)
    if dataset in known or hub_dataset_name(dataset) is not None:
        return None
    path = Path(dataset)
    if path.is_dir() and text_suffix(path) is None:
        return path
    if text_suffix(path) is not None:
        if path.is_file():
            return path
        raise UnknownDatasetError(f"calibration file {dataset} does not exist or is not a file; check the path")
    close = difflib.get_close_matches(dataset.lower(), known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UnknownDatasetError(
        f"unknown calibration data {dataset!r}; choose one of {', '.join(known)}, namespace/name:split for a data set "
        f"on the Hub, or the path of a {LOCAL_FILES} file, or of a folder of texts, images or audio.{hint}"
    )
