"""Files of a healed artifact: those of the artifact with other values, and the dense export that follows from it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from rocket_core.checkpoint import TensorEntry, open_checkpoint, plan_copy, write_safetensors
from rocket_core.checkpoint.reader import read_header
from rocket_core.errors import FaultyResultError
from rocket_core.evaluation import ModelFolder, load_model, open_model
from rocket_core.inspection.files.model_files import CONFIG_NAME, companions, copy_file, read_file
from rocket_core.inspection.files.safetensors_headers import INDEX_NAME
from rocket_core.pipeline.result_faults import naming_faults
from rocket_core.system.files import Opener, atomic_write, compared


def write_healed(
    artifact: Path, healed: Mapping[str, TensorEntry], folder: Path, *, on_tensor: Callable[[str], None]
) -> None:
    """Write an artifact's files with the values of some tensors replaced, into an empty folder.

    Names, shapes and dtypes of tensors do not change, and neither does the size of any file.

    Args:
        artifact: the artifact.
        healed: tensors to replace, by name.
        folder: an existing, empty folder.
        on_tensor: called with each name before it is written.
    """
    _write_weights(artifact, healed, folder, on_tensor, atomic_write)
    for name in (CONFIG_NAME, INDEX_NAME):
        if (artifact / name).is_file():
            copy_file(artifact, Path(name), folder / name)
    _copy_companions(artifact, folder)


def check_healed(
    artifact: Path,
    healed: Mapping[str, TensorEntry],
    folder: Path,
    window: Int64[Tensor, "1 tokens"],
    device: torch.device,
) -> None:
    """Raise an error if a healed artifact holds other tensors than those that were written, or cannot be run.

    Args:
        artifact: the artifact before healing.
        healed: the tensors that were replaced, by name.
        folder: the healed artifact, which is loaded as a whole.
        window: tokens to run.
        device: device to run on.

    Raises:
        FaultyResultError: the healed artifact is faulty.
    """
    # The work folder's export is written again in any case.
    with naming_faults("rocket", discard=lambda: None):
        _write_weights(artifact, healed, folder, lambda _key: None, compared)
        model = load_model(open_model(folder), device, as_deployed=True)
        with torch.no_grad():
            logits = cast("Any", model)(input_ids=window.to(device)).logits
        if not bool(logits.isfinite().all()):
            raise FaultyResultError("it predicts numbers that are not finite")


def _write_weights(
    artifact: Path,
    healed: Mapping[str, TensorEntry],
    folder: Path,
    on_tensor: Callable[[str], None],
    opener: Opener,
) -> None:
    for file in open_checkpoint(artifact).files:
        plans = [plan_copy(healed.get(entry.key, entry), key=entry.key) for entry in read_header(file)]
        with opener(folder / file.name) as stream:
            write_safetensors(stream, plans, on_tensor=on_tensor)


def write_dense(artifact: ModelFolder, folder: Path, *, max_shard_bytes: int) -> None:
    """Write a `rocket` artifact with stock names and shapes, into an empty folder; loads the whole model.

    Args:
        artifact: the `rocket` artifact.
        folder: an existing, empty folder.
        max_shard_bytes: size at which a new safetensors file is started.
    """
    model = load_model(artifact, torch.device("cpu"), as_deployed=True)
    dense = cast("PreTrainedModel", cast("Any", model).dequantize())
    dense.save_pretrained(folder, max_shard_size=max_shard_bytes)
    config = json.loads(read_file(artifact.path, CONFIG_NAME))
    del config["quantization_config"]
    with atomic_write(folder / CONFIG_NAME) as stream:
        stream.write((json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())
    _copy_companions(artifact.path, folder)


def _copy_companions(artifact: Path, folder: Path) -> None:
    for file in companions(artifact, artifact.name):
        (folder / file).parent.mkdir(exist_ok=True)
        copy_file(artifact, file, folder / file)
