"""The sample model of a clone, which a new service offers."""

import shutil
from pathlib import Path

_SAMPLE = Path(__file__).parents[2] / "examples" / "tiny-llama"


def create_models_folder(folder: Path, sample: Path = _SAMPLE) -> None:
    """Create the models folder with the sample model in it; a folder that exists is left as it is.

    An installed package has no sample; its service starts with an empty folder.

    Args:
        folder: the models folder.
        sample: folder of the sample model.
    """
    if folder.exists():
        return
    folder.mkdir(parents=True)
    if sample.is_dir():
        # Under a name that is not offered until it is complete.
        partial = folder / f".{sample.name}"
        shutil.copytree(sample, partial)
        partial.rename(folder / sample.name)
