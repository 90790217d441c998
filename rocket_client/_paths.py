"""Paths, bodies and headers of requests, with validation that keeps arguments from altering the request."""

import math
import re
from collections.abc import Mapping
from typing import assert_never

from rocket_client.errors import InvalidArgumentError
from rocket_core.config import ONE_FORMAT_METHODS
from rocket_core.sizes.target import ByBits, ByBytes, ByRatio, target_of

# A ratio of 0 is valid, the server refuses 0 bits, and an empty evaluation requests one with all defaults.
_MAY_BE_EMPTY = frozenset({"ratio", "bits", "evaluate"})
_ID = re.compile(r"[A-Za-z0-9_-]+")


def job_path(job_id: str, *parts: str) -> str:
    """Return the path of a job, or of a part of it.

    Raises:
        InvalidArgumentError: the id is not valid.
    """
    # An id becomes part of a path, so it must not contain characters that change the path.
    if not _ID.fullmatch(job_id):
        raise InvalidArgumentError(f"{job_id!r} is not a job id; job ids look like job_0123456789abcdefghjkmnpqrs")
    return "/".join(("/jobs", job_id, *parts))


def profile_path(profile_id: str, *parts: str) -> str:
    """Return the path of a profile, or of a part of it; raises the same errors as `job_path`."""
    if not _ID.fullmatch(profile_id):
        raise InvalidArgumentError(
            f"{profile_id!r} is not a profile id; profile ids look like prof_0123456789abcdefghjkmnpqrs"
        )
    return "/".join(("/profiles", profile_id, *parts))


def webhook_path(webhook_id: str) -> str:
    """Return the path of a webhook; raises the same errors as `job_path`."""
    if not _ID.fullmatch(webhook_id):
        raise InvalidArgumentError(
            f"{webhook_id!r} is not a webhook id; webhook ids look like hook_0123456789abcdefghjkmnpqrs"
        )
    return f"/webhooks/{webhook_id}"


def target(
    ratio: float | None,
    target_bytes: int | None,
    bits: float | None,
    options: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return the target as part of a body; raises InvalidArgumentError unless exactly one number is given.

    No number is needed for a method of which `options` specify the format.
    """
    try:
        requested = target_of(ratio, target_bytes, bits)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None
    match requested:
        case ByRatio(ratio=fraction):
            if not math.isfinite(fraction):
                raise InvalidArgumentError(f"the ratio is {fraction}; it is a fraction, from 0 to below 1")
            return {"ratio": fraction}
        case ByBytes(target_bytes=size):
            return {"target_bytes": size}
        case ByBits(bits=number):
            if not math.isfinite(number):
                raise InvalidArgumentError(f"the bits per weight are {number}; give a number above 0, up to 16")
            return {"bits": number}
        case None if (options or {}).get("method") in ONE_FORMAT_METHODS:
            return {}
        case None:
            raise InvalidArgumentError("specify one of ratio, target_bytes and bits")
        case _:
            assert_never(requested)


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
