"""Files of a work folder: each is written atomically, and if damaged, the error says what to remove.

Two processes may write one at once, with the same content.
"""

import functools
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import BaseModel, ValidationError

from rocket_core.checkpoint import TensorEntry, plan_tensor, write_safetensors
from rocket_core.checkpoint.reader import read_header
from rocket_core.errors import CorruptCheckpointError, RocketError
from rocket_core.system.files import atomic_write

Model = TypeVar("Model", bound=BaseModel)


def write_text(file: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(file, temporary=_temporary(file)) as stream:
        stream.write(text.encode())


def write_model(file: Path, model: BaseModel) -> None:
    """Write a model as JSON, atomically."""
    write_text(file, model.model_dump_json(indent=1))


def read_model(file: Path, model: type[Model]) -> Model:
    """Read a model written by `write_model`.

    Raises:
        CorruptCheckpointError: the file is damaged; the message says what to remove.
    """
    with _naming_the_file(file):
        return model.model_validate_json(file.read_bytes())


def find_model(file: Path, model: type[Model]) -> Model | None:
    """Read a model written by `write_model`; None if the file does not exist.

    Raises:
        CorruptCheckpointError: the file is damaged; the message says what to remove.
    """
    return read_model(file, model) if file.is_file() else None


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file atomically."""
    plans = [
        plan_tensor(key, tensor.dtype, tensor.shape, functools.partial(tensors.__getitem__, key))
        for key, tensor in tensors.items()
    ]
    with atomic_write(file, temporary=_temporary(file)) as stream:
        write_safetensors(stream, plans)


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, on the CPU.

    Raises:
        CorruptCheckpointError: the file is damaged; the message says what to remove.
    """
    return {key: entry.read() for key, entry in tensor_entries(file).items()}


def tensor_entries(file: Path) -> dict[str, TensorEntry]:
    """Return the locations of the tensors of a safetensors file, to read them one by one.

    Raises:
        CorruptCheckpointError: the file is damaged; the message says what to remove.
    """
    with _naming_the_file(file):
        return {entry.key: entry for entry in read_header(file)}


def _temporary(file: Path) -> Path:
    return file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")


@contextmanager
def _naming_the_file(file: Path) -> Iterator[None]:
    try:
        yield
    except (ValidationError, RocketError) as error:
        raise CorruptCheckpointError(f"{file} is damaged; remove {file} and resume ({error})") from error
