"""Paths, bodies and headers of requests, with validation that keeps arguments from altering the request."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from rocket_client._wire import Call
from rocket_client.errors import InvalidArgumentError
from rocket_client.models import Upload
from rocket_core.config import ONE_FORMAT_METHODS
from rocket_core.sizes.target import MEMBERS, TARGET_NAMES

# A ratio of 0 is valid, the server refuses 0 bits and no bounds, and an empty evaluation has all defaults.
_MAY_BE_EMPTY = frozenset({*MEMBERS, "evaluate", "accept"})
_NUMBERS = {
    "ratio": "a fraction, from 0 to below 1",
    "target_bytes": "bytes",
    "bits": "bits per weight, above 0 and up to 16",
    "max_kl": "nats per token, above 0",
    "max_perplexity_increase": "a fraction, above 0 and below 1",
}
_ID = re.compile(r"[A-Za-z0-9_-]+")
_UPLOAD_ID = re.compile(r"upload/[0-9a-f]{32}")
_MODEL_NAME = re.compile(r"[A-Za-z0-9._-]+")
_UPLOAD_TYPES = {".txt": "text/plain", ".jsonl": "application/jsonl"}

Setting = TypeVar("Setting")


def job_path(job_id: str, *parts: str) -> str:
    """Return the path of a job, or of a part of it.

    Raises:
        InvalidArgumentError: the id is not valid.
    """
    return _path("job", "job", job_id, *parts)


def profile_path(profile_id: str, *parts: str) -> str:
    """Return the path of a profile, or of a part of it; raises the same errors as `job_path`."""
    return _path("profile", "prof", profile_id, *parts)


def webhook_path(webhook_id: str, *parts: str) -> str:
    """Return the path of a webhook, or of a part of it; raises the same errors as `job_path`."""
    return _path("webhook", "hook", webhook_id, *parts)


def upload_path(upload_id: str) -> str:
    """Return the path of an uploaded text; raises InvalidArgumentError if the id is not valid."""
    if not _UPLOAD_ID.fullmatch(upload_id):
        raise InvalidArgumentError(
            f"{upload_id!r} is not an upload id; expected upload/ followed by 32 hexadecimal digits"
        )
    return f"/calibrations/{upload_id.partition('/')[2]}"


def uploaded_model_path(model_id: str) -> str:
    """Return the path of an uploaded model; raises InvalidArgumentError if the id is not valid."""
    prefix, _, name = model_id.partition("/")
    if prefix != "upload" or not name:
        raise InvalidArgumentError(f"{model_id!r} is not an uploaded model; expected upload/NAME")
    return model_path(name)


def model_path(name: str, *parts: str) -> str:
    """Return the path of an uploaded model, or of a part of it; raises InvalidArgumentError for an invalid name."""
    if not _MODEL_NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"{name!r} is not a name for a model; use letters, digits, dots, dashes and underscores"
        )
    return "/".join(("/models", name, *parts))


def target(members: Mapping[str, object], options: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return the target as part of a body; raises InvalidArgumentError unless exactly one member is given.

    No target is needed for a method of which `options` specify the format.

    Args:
        members: `ratio`, `target_bytes`, `bits`, `fit`, `max_kl` and `max_perplexity_increase`.
        options: settings of the method.
    """
    given = without_none(members)
    if len(given) > 1:
        raise InvalidArgumentError(f"specify only one of {TARGET_NAMES}")
    if not given and (options or {}).get("method") not in ONE_FORMAT_METHODS:
        raise InvalidArgumentError(f"specify one of {TARGET_NAMES}")
    for name, number in given.items():
        if isinstance(number, int | float) and not math.isfinite(number):
            raise InvalidArgumentError(f"{name} is {number}; give a number: {_NUMBERS[name]}")
    return given


def request_body(model_id: str, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the body that requests a job for a model."""
    # Any other empty part means the same as an omitted one.
    sent = {name: value for name, value in settings.items() if value or (name in _MAY_BE_EMPTY and value is not None)}
    return {"model_id": model_id} | sent


def token_header(hub_token: str | None) -> dict[str, str]:
    """Return the header with a Hub token, if given; raises InvalidArgumentError if the token is not valid."""
    if hub_token is None:
        return {}
    if not hub_token.isascii() or not hub_token.isprintable():
        raise InvalidArgumentError("the Hub token contains characters other than printable ASCII; copy it again")
    return {"Hub-Token": hub_token}


def header_text(text: str) -> str:
    """Return the text unchanged; raises InvalidArgumentError if it is not valid in a header."""
    if not text.isascii() or not text.isprintable():
        raise InvalidArgumentError("the idempotency key contains characters other than printable ASCII; use others")
    return text


def prediction_target(numbers: Mapping[str, float | None]) -> dict[str, float]:
    """Return the body that requests a predicted allocation; raises InvalidArgumentError unless one number is given."""
    given = without_none(numbers)
    if len(given) != 1 or not all(map(math.isfinite, given.values())):
        raise InvalidArgumentError("specify exactly one of ratio, model_bytes, bits and error")
    return given


def without_none(settings: Mapping[str, Setting | None]) -> dict[str, Setting]:
    """Return the settings that are given."""
    return {name: value for name, value in settings.items() if value is not None}


def calibration_upload(file: Path) -> Call[Upload]:
    """Return the request that uploads a calibration file; raises InvalidArgumentError for an unsupported file type."""
    kind = _UPLOAD_TYPES.get(file.suffix.lower())
    if kind is None:
        raise InvalidArgumentError(f"{file} is neither .txt nor .jsonl; `rocket upload` converts others")
    return Call(
        method="POST",
        path="/calibrations",
        params={"name": file.name if file.name.isprintable() else None},
        file=file,
        headers={"Content-Type": kind},
        answer=Upload,
    )


def _path(kind: str, prefix: str, identifier: str, *parts: str) -> str:
    # An id becomes part of a path, so it must not contain characters that change the path.
    if not _ID.fullmatch(identifier):
        raise InvalidArgumentError(
            f"{identifier!r} is not a {kind} id; {kind} ids look like {prefix}_0123456789abcdefghjkmnpqrs"
        )
    return "/".join((f"/{kind}s", identifier, *parts))
