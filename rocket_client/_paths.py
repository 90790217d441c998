"""Paths, bodies and headers of requests, from what a caller gives; nothing of it can become another request."""

import math
import re
from collections.abc import Mapping

from rocket_client.errors import InvalidArgumentError

# A ratio of 0 is one, and an evaluation is asked for by naming it.
_MAY_BE_EMPTY = frozenset({"ratio", "evaluate"})
_ID = re.compile(r"[A-Za-z0-9_-]+")


def job_path(job_id: str, *parts: str) -> str:
    """Where a job, or a part of it, is.

    Raises:
        InvalidArgumentError: that is no id.
    """
    # An id becomes part of a path: nothing that could be another one.
    if not _ID.fullmatch(job_id):
        raise InvalidArgumentError(f"{job_id!r} is not a job id; job ids look like job_0123456789abcdefghjkmnpqrs")
    return "/".join(("/jobs", job_id, *parts))


def profile_path(profile_id: str, *parts: str) -> str:
    """Where a profile, or a part of it, is; raises as `job_path`."""
    if not _ID.fullmatch(profile_id):
        raise InvalidArgumentError(
            f"{profile_id!r} is not a profile id; profile ids look like prof_0123456789abcdefghjkmnpqrs"
        )
    return "/".join(("/profiles", profile_id, *parts))


def target(ratio: float | None, target_bytes: int | None) -> dict[str, object]:
    """How small a model shall become; raises InvalidArgumentError unless one of both is given, and a number."""
    given: dict[str, object] = {"ratio": ratio, "target_bytes": target_bytes}
    wanted = {name: value for name, value in given.items() if value is not None}
    if len(wanted) != 1:
        raise InvalidArgumentError("specify either ratio or target_bytes")
    if ratio is not None and not math.isfinite(ratio):
        raise InvalidArgumentError(f"the ratio is {ratio}; it is a fraction, from 0 to below 1")
    return wanted


def request_body(model_id: str, given: Mapping[str, object]) -> dict[str, object]:
    """What asks for a job: the model, and what is given."""
    # Any other empty part is as good as none.
    sent = {name: value for name, value in given.items() if value or (name in _MAY_BE_EMPTY and value is not None)}
    return {"model_id": model_id} | sent


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
