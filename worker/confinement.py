"""Confinement of processes that read untrusted files: what they may access, and how much they may take.

This module imports no library that starts threads, because access to files is restricted for one thread only.
"""

import resource
import sys
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from app.shared.confinement import Enforced, Sandbox, become_user, enter_sandbox, limit_memory
from worker.channel import Channel, Message

_Count = Annotated[int, Field(gt=0)]


class Confinement(Message):
    """The first message to a confined process."""

    readable: tuple[Path, ...]
    """files and folders that it may read."""
    writable: tuple[Path, ...]
    """folders that it may also write to."""
    network: bool
    """whether it may open sockets."""
    required: bool = False
    """whether it must end if the system does not restrict all that."""
    user: int | None = None
    """user that it becomes; None keeps that of the service."""
    memory_bytes: _Count | None = None
    """memory limit until its requirement is known; None sets no limit."""
    file_bytes: _Count | None = None
    """size of the largest file that it may write; None sets no limit."""
    processes: _Count | None = None
    """number of processes and threads of its user, from which on it can start no more; None sets no limit."""

    @property
    def sandbox(self) -> Sandbox:
        """What it may use."""
        return Sandbox(readable=self.readable, writable=self.writable, network=self.network)


CONFINEMENT = TypeAdapter(Confinement)


def enter_confinement(channel: Channel) -> Enforced:
    """Confine this process permanently, as the first message on its channel says.

    Call it while the process has only one thread.

    Raises:
        SandboxError: the system does not restrict what it must; the process must end.
    """
    settings = channel.receive(CONFINEMENT)
    assert settings is not None
    if settings.user is not None:
        become_user(settings.user)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, settings.file_bytes)
    if sys.platform == "linux":
        # Elsewhere it counts the processes of the whole session.
        _limit(resource.RLIMIT_NPROC, settings.processes)
    if settings.memory_bytes is not None:
        limit_memory(settings.memory_bytes)
    return enter_sandbox(settings.sandbox, required=settings.required)


def _limit(kind: int, most: int | None) -> None:
    """Set a limit that this process cannot raise again."""
    if most is not None:
        _soft, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
