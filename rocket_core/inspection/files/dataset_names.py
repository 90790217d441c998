"""Names of data sets and files of calibration data. Loads no torch."""

import difflib
from pathlib import Path

from rocket_core.config import BUILTIN_DATASET, HUB_DATASETS, SYNTHETIC_DATASET
from rocket_core.errors import UnknownDatasetError

LOCAL_SUFFIXES = (".jsonl", ".txt")


def local_path_of(dataset: str) -> Path | None:
    """Return the path if a data set is a local file or folder; also a way to reject a wrong choice early.

    Args:
        dataset: `builtin`, `synthetic`, a name of `HUB_DATASETS`, the path of a `.txt` or `.jsonl` file, or of a folder
            of images or audio. Names take precedence over files.

    Returns:
        The file or folder, or None for a name.

    Raises:
        UnknownDatasetError: not a known name, an existing file of those kinds, or a folder.
    """
    known = (BUILTIN_DATASET, *HUB_DATASETS, SYNTHETIC_DATASET)
    if dataset in known:
        return None
    path = Path(dataset)
    if path.suffix.lower() in LOCAL_SUFFIXES:
        if path.is_file():
            return path
        raise UnknownDatasetError(f"calibration file {dataset} does not exist or is not a file; check the path")
    if path.is_dir():
        return path
    close = difflib.get_close_matches(dataset.lower(), known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UnknownDatasetError(
        f"unknown calibration data {dataset!r}; choose one of {', '.join(known)},"
        f" or the path of a {' or '.join(LOCAL_SUFFIXES)} file, or of a folder of images or audio.{hint}"
    )
