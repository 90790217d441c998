"""How the processes of jobs are confined: the strongest way that works here, or the one that the operator names.

===========  =======================================================================================
bubblewrap   in their own namespaces: no other file, process or shared memory exists for them
container    as another user than the service, in its own container
landlock     as the service's user
===========  =======================================================================================

In each of them the processes also enter the sandbox of `app.shared.confinement`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from app.shared.confinement import bubblewrap_fault, may_change_user, supported
from app.shared.errors import InvalidSettingsError
from app.shared.settings import Settings
from worker.processes.children import COMPUTE_PROGRAM

Mechanism = Literal["bubblewrap", "container", "landlock"]

COMPUTE_USER = 10002
"""User and group of the processes that compute, in our container; see the Dockerfile."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolation:
    """How the processes of an attempt are confined.

    Attributes:
        mechanism: the mechanism.
        is_required: whether a process must end that the system does not restrict in every part.
    """

    mechanism: Mechanism = "landlock"
    is_required: bool = False

    def user_of(self, program: Sequence[str]) -> int | None:
        """Return the user that a program's process becomes; None if it keeps that of the service."""
        return COMPUTE_USER if self.mechanism == "container" and tuple(program) == COMPUTE_PROGRAM else None


def choose_mechanism(isolation: str) -> Mechanism:
    """Return the mechanism for a setting, whose condition `check_isolation` has checked."""
    match isolation:
        case "bubblewrap" | "container" | "landlock":
            return isolation
        case _:
            return "landlock" if bubblewrap_fault() else "bubblewrap"


def check_isolation(settings: Settings) -> None:
    """Log how jobs are confined, and what this system does not restrict.

    Raises:
        InvalidSettingsError: what the setting asks for does not work here.
    """
    isolation = settings.isolation
    if isolation == "bubblewrap" and (fault := bubblewrap_fault()):
        raise InvalidSettingsError(
            f"ROCKET_ISOLATION is bubblewrap, which does not work here ({fault}); install it, allow unprivileged user "
            "namespaces, or use auto"
        )
    if isolation == "container" and not may_change_user():
        raise InvalidSettingsError(
            "ROCKET_ISOLATION is container, but this process may not start others as another user; give the container "
            "the capabilities of docker-compose.yml, or use auto"
        )
    missing = supported().missing
    if missing and settings.requires_isolation:
        raise InvalidSettingsError(
            f"ROCKET_ISOLATION is {isolation}, but this system cannot restrict {', '.join(missing)} of jobs; use "
            "Linux 5.13 or later with Landlock and seccomp, or set it to auto"
        )
    if missing:
        _log.warning("this system cannot restrict %s of jobs; run only models that you trust", ", ".join(missing))
    _log.info("jobs are confined by %s", choose_mechanism(isolation))
