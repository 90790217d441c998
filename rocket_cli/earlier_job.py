"""Requests for the same as an earlier job, with other settings."""

from typing import TYPE_CHECKING, Any

import typer
from pydantic import BaseModel

from rocket_core.sizes.target import MEMBERS

if TYPE_CHECKING:
    from rocket_client.models import Job

IMPROVES = "improves"
"""Label of a job with the id of the one that it is to be compared with."""

# What a client chooses; other settings follow from the preset.
_CHOSEN = ("preset", "method", "code_bits", "engine", "include", "ignore", "export", "heal_tokens")
_KEPT = ("revision", "evaluate", "accept")


def request_like(job: "Job", given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Rocket.submit` for what a job does, changed by those that are given.

    Args:
        job: the earlier job.
        given: arguments of `Rocket.submit` by name; those that are None, and members that mappings lack, are the job's.

    Raises:
        typer.BadParameter: the job is not a compression.
    """
    if job.kind != "compression":
        raise typer.BadParameter(f"{job.id} is a job of kind {job.kind}, not a compression", param_hint="--from")
    has_target = any(given.get(name) is not None for name in MEMBERS)
    names = _KEPT if has_target else (*_KEPT, *MEMBERS)
    earlier = {name: _plain(getattr(job, name)) for name in names}
    chosen = {name: job.options[name] for name in _CHOSEN if job.options.get(name) is not None}
    return (
        earlier
        | {name: value for name, value in given.items() if value is not None}
        | {
            "calibration": job.calibration.model_dump(exclude_none=True) | (given.get("calibration") or {}),
            "options": chosen | given["options"],
            "benchmark": job.benchmark or given["benchmark"],
        }
    )


def _plain(value: object) -> object:
    return value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value
