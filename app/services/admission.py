"""What can be told of a request before there is a job: names that do not exist, models that cannot be compressed.

The rest is found in the job's `preflight` stage, under the same codes.
"""

import json
from pathlib import Path

from app.shared.catalog import find_dataset, find_local_model
from app.shared.requests import LOCAL, JobRequest
from app.shared.settings import Settings
from rocket_core.errors import AlreadyQuantizedError, CheckpointFormatError, UnsupportedArchitectureError

_MAX_CONFIG_BYTES = 2**20


def admit(settings: Settings, request: JobRequest) -> None:
    """Refuses a request that no worker could carry out.

    Raises:
        RocketError: with the code that the job would have failed with.
    """
    find_dataset(settings, request.calibration.dataset)
    if request.model_id.startswith(LOCAL):
        _admit_local_model(find_local_model(settings, request.model_id))


def _admit_local_model(folder: Path) -> None:
    config = _read_config(folder / "config.json")
    if "quantization_config" in config:
        raise AlreadyQuantizedError("the model is quantized already; submit the original floating-point checkpoint")
    if config.get("is_encoder_decoder"):
        raise UnsupportedArchitectureError("the model is an encoder-decoder; only decoder-only models are supported")
    if not any(folder.glob("*.safetensors")):
        raise CheckpointFormatError("the model has no safetensors; other formats can run code and are not read")


def _read_config(file: Path) -> dict[str, object]:
    if file.stat().st_size > _MAX_CONFIG_BYTES:
        raise UnsupportedArchitectureError("the model's config.json is too large to be one")
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise UnsupportedArchitectureError("the model's config.json is no JSON; repair the model folder") from error
    if not isinstance(config, dict):
        raise UnsupportedArchitectureError("the model's config.json is no JSON object; repair the model folder")
    return config
