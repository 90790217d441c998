"""How the processes of jobs are confined: the strongest way that works here, or the one that the operator names.

===========  =======================================================================================
bubblewrap   in namespaces of their own: no other file, process or shared memory exists for them
container    as another user than the service, in a container of its own
landlock     as the service's user
===========  =======================================================================================

In each of them the processes also enter the sandbox of `app.shared.confinement`.
"""

import logging
import os
from typing import Literal

from app.shared.confinement import bubblewrap_fault, may_change_user, supported
from app.shared.errors import InvalidSettingsError

Mechanism = Literal["bubblewrap", "container", "landlock"]

COMPUTE_USER = 10002
"""User and group of the processes that compute, in a container of ours; see the Dockerfile."""

_log = logging.getLogger(__name__)


def choose_mechanism(isolation: str) -> Mechanism:
    """Return the mechanism for a setting, whose condition `check_isolation` has checked."""
    match isolation:
        case "bubblewrap" | "container" | "landlock":
            return isolation
        case _:
            return "landlock" if bubblewrap_fault() else "bubblewrap"


def check_isolation(isolation: str) -> None:
    """Log how jobs are confined, and what this system does not restrict.

    Args:
        isolation: the setting.

    Raises:
        InvalidSettingsError: what the setting asks for does not work here.
    """
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
    if missing and isolation not in {"auto", "container"}:
        raise InvalidSettingsError(
            f"ROCKET_ISOLATION is {isolation}, but this system cannot restrict {', '.join(missing)} of jobs; use "
            "Linux 5.13 or later with Landlock and seccomp, or set it to auto"
        )
    if missing:
        _log.warning("this system cannot restrict %s of jobs; run only models that you trust", ", ".join(missing))
    _log.info("jobs are confined by %s", choose_mechanism(isolation), extra={"user": os.getuid()})
