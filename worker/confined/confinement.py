"""Confinement of processes that read untrusted files: what they may access.

This module imports no library that starts threads, because access to files is restricted for one thread only.
"""

import threading

from pydantic import TypeAdapter

from app.shared.confinement import Sandbox, become_user, enter_sandbox
from worker.processes.channel import Channel, Message
from worker.processes.linux import set_on_sigterm


class Confinement(Message):
    """The first message to a confined process."""

    sandbox: Sandbox
    """what it may use."""
    required: bool = False
    """whether it must end if the system does not restrict all that."""
    user: int | None = None
    """user that it becomes; None keeps that of the service."""


CONFINEMENT = TypeAdapter(Confinement)


def start_confined(channel: Channel) -> tuple[Confinement, threading.Event]:
    """Confine this process; return how, and what is set once it is asked to stop."""
    stop = threading.Event()
    set_on_sigterm(stop)
    return enter_confinement(channel), stop


def enter_confinement(channel: Channel) -> Confinement:
    """Confine this process permanently, as the first message on its channel says, and return that message.

    Call it while the process has only one thread.

    Raises:
        SandboxError: the system does not restrict what it must; the process must end.
    """
    settings = channel.receive(CONFINEMENT)
    assert settings is not None
    if settings.user is not None:
        become_user(settings.user)
    enter_sandbox(settings.sandbox, required=settings.required)
    return settings
