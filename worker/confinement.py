"""Confinement of processes that read untrusted files: what they may access, and how much memory they may use.

This module imports no library that starts threads, because access to files is restricted for one thread only.
"""

import logging
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from app.shared.confinement import Enforced, Sandbox, enter_sandbox, limit_memory, supported
from app.shared.errors import InvalidSettingsError
from worker.channel import Channel, Message

_log = logging.getLogger(__name__)


class Confinement(Message):
    """The first message to a confined process."""

    readable: tuple[Path, ...]
    """files and folders that it may read."""
    writable: tuple[Path, ...]
    """folders that it may also write to."""
    network: bool
    """whether it may open sockets."""
    memory_bytes: Annotated[int, Field(gt=0)] | None = None
    """memory limit until its requirement is known; None sets no limit."""


CONFINEMENT = TypeAdapter(Confinement)


def enter_confinement(channel: Channel) -> Enforced:
    """Confine this process permanently, as the first message on its channel says.

    Call it while the process has only one thread.
    """
    settings = channel.receive(CONFINEMENT)
    assert settings is not None
    if settings.memory_bytes is not None:
        limit_memory(settings.memory_bytes)
    return enter_sandbox(Sandbox(readable=settings.readable, writable=settings.writable, network=settings.network))


def check_isolation(isolation: str) -> None:
    """Raise an error if isolation is required but not available.

    Args:
        isolation: the setting: `auto` or `required`.

    Raises:
        InvalidSettingsError: isolation is required, and this system does not enforce all of it.
    """
    missing = supported().missing
    if missing and isolation == "required":
        raise InvalidSettingsError(
            f"ROCKET_JOB_ISOLATION is `required`, but this system cannot restrict {', '.join(missing)} of jobs; use "
            "Linux 5.13 or later with Landlock and seccomp, or set it to auto"
        )


def log_missing_isolation() -> None:
    """Log a warning about what this system does not restrict."""
    missing = supported().missing
    if missing:
        _log.warning("this system cannot restrict %s of jobs; run only models that you trust", ", ".join(missing))
