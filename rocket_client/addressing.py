"""Paths, bodies and headers of requests, from what a caller gives; nothing of it can become another request."""

import math
import re
from collections.abc import Mapping

from rocket_client.errors import InvalidArgumentError

_ID = re.compile(r"[A-Za-z0-9_-]+")


def job_path(job_id: str, *parts: str) -> str:
    """Where a job, or a part of it, is.

    Raises:
        InvalidArgumentError: that is no id.
    """
    # An id becomes part of a path: nothing that could be another one.
    if not _ID.fullmatch(job_id):
        raise InvalidArgumentError(f"{job_id!r} is no job's id, which look like job_0123456789abcdefghjkmnpqrs")
    return "/".join(("/jobs", job_id, *parts))


def profile_path(profile_id: str, *parts: str) -> str:
    """Where a profile, or a part of it, is; raises as `job_path`."""
    if not _ID.fullmatch(profile_id):
        raise InvalidArgumentError(
            f"{profile_id!r} is no profile's id, which look like prof_0123456789abcdefghjkmnpqrs"
        )
    return "/".join(("/profiles", profile_id, *parts))


def request_body(model_id: str, ratio: float, given: Mapping[str, object]) -> dict[str, object]:
    """What asks for a job; raises InvalidArgumentError if the ratio is no number."""
    if not math.isfinite(ratio):
        raise InvalidArgumentError(f"the ratio is {ratio}; it is a fraction, from 0 to below 1")
    # An empty part is as good as none, but for an evaluation: that is asked for by naming it.
    sent = {name: value for name, value in given.items() if value or (name == "evaluate" and value is not None)}
    return {"model_id": model_id, "ratio": ratio} | sent


def token_header(hub_token: str | None) -> dict[str, str]:
    """The header with a Hub token, if there is one; raises InvalidArgumentError if it cannot be one."""
    if hub_token is None:
        return {}
    if not hub_token.isascii() or not hub_token.isprintable():
        raise InvalidArgumentError("a Hub token has printable ASCII characters only")
    return {"Hub-Token": hub_token}


def header_text(text: str) -> str:
    """A text that a header can hold; raises InvalidArgumentError if it cannot."""
    if not text.isascii() or not text.isprintable():
        raise InvalidArgumentError("an idempotency key has printable ASCII characters only")
    return text
