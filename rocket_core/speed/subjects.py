"""Models to measure, recognized by their files without loading any."""

from pathlib import Path

from rocket_core.errors import CheckpointFormatError, InvalidConfigError, ModelNotFoundError
from rocket_core.inspection.checks.preconditions import MAX_CONFIG_BYTES, parse_config
from rocket_core.inspection.files.model_files import CONFIG_NAME, read_start, vet_folder
from rocket_core.inspection.files.safetensors_headers import local_weight_files
from rocket_core.report.run_commands import PROJECTOR_NAME
from rocket_core.report.speed import Packing, Runtime
from rocket_core.schema import FrozenModel

GGUF_SUFFIX = ".gguf"
# `quant_method` of an artifact of this library, and how its reports name it.
_ROCKET = "rocket"


class Subject(FrozenModel):
    """A model to measure."""

    name: str
    """its name in the report."""
    path: Path
    """its folder, or its GGUF file."""
    form: str
    """form of its weights; see `ModelSpeed`."""
    packing: Packing = "default"
    """how layers are held in memory."""
    stored_bytes: int
    """bytes of its weights on disk."""

    @property
    def runtime(self) -> Runtime:
        """What runs it."""
        return "llama.cpp" if self.path.suffix == GGUF_SUFFIX else "transformers"


def find_subject(path: Path, name: str, packing: Packing = "default") -> Subject:
    """Recognize a model by its files.

    Args:
        path: folder with config.json and safetensors, a GGUF file, or a folder with one.
        name: its name in the report.
        packing: how its layers are held in memory, if it is an artifact of this library.

    Raises:
        ModelNotFoundError: no model is there.
        InvalidConfigError: a folder has several GGUF files.
        CheckpointError: the files of the folder cannot be read.
    """
    path = path.expanduser()
    if path.is_file():
        if path.suffix != GGUF_SUFFIX:
            raise ModelNotFoundError(f"{name} is neither a folder nor a {GGUF_SUFFIX} file; check the path")
        return _gguf(path, name)
    if not path.is_dir():
        raise ModelNotFoundError(f"{name} does not exist; check the path")
    if (path / CONFIG_NAME).is_file():
        return _folder(path.resolve(), name, packing)
    files = sorted(file for file in path.glob(f"*{GGUF_SUFFIX}") if file.name != PROJECTOR_NAME)
    if len(files) > 1:
        raise InvalidConfigError(f"{name} has {len(files)} {GGUF_SUFFIX} files; name one of them")
    if files:
        return _gguf(files[0], name)
    below = sorted(file.parent.name for file in path.glob(f"*/{CONFIG_NAME}"))
    hint = f"; name one of its folders: {', '.join(below)}" if below else "; check the path"
    raise ModelNotFoundError(f"{name} holds no model: neither {CONFIG_NAME} nor a {GGUF_SUFFIX} file is there{hint}")


def _gguf(file: Path, name: str) -> Subject:
    size = file.stat().st_size
    if not size:
        raise CheckpointFormatError(f"{file} is empty; copy or download it again")
    return Subject(name=name, path=file.resolve(), form="gguf", stored_bytes=size)


def _folder(folder: Path, name: str, packing: Packing) -> Subject:
    vet_folder(folder, name)
    settings = parse_config(read_start(folder, CONFIG_NAME, MAX_CONFIG_BYTES + 1), name)
    quantization = settings.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    form = "dense" if method is None else str(method)
    return Subject(
        name=name,
        path=folder,
        form=form,
        packing=packing if form == _ROCKET else "default",
        stored_bytes=sum(file.stat().st_size for file in local_weight_files(folder, name)),
    )
