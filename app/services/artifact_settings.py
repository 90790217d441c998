"""Settings of a compressed model, read from its artifact in the store."""

import logging
from typing import Any

from sqlalchemy.orm import Session

from app.services.context import Context
from app.shared.models import Artifact, Job
from app.shared.repositories import outputs
from rocket_core.engines import ExportKind
from rocket_core.errors import UnsupportedArchitectureError
from rocket_core.inspection.checks.preconditions import MAX_CONFIG_BYTES, parse_config
from rocket_core.inspection.files.model_files import CONFIG_NAME

_log = logging.getLogger(__name__)


def find_settings(session: Session, job: Job, kind: ExportKind) -> Artifact | None:
    """Return the config.json of an export of a job; None without one."""
    name = f"{kind}/{CONFIG_NAME}"
    return next((file for file in outputs.list_artifacts(session, job) if file.name == name), None)


def read_settings(context: Context, config: Artifact | None) -> dict[str, Any]:
    """Return the content of such a file; empty if it cannot be judged.

    Raises:
        StorageError: the file cannot be read.
    """
    if config is None or config.storage_key is None:
        return {}
    raw = b"".join(context.artifacts.read(config.storage_key, 0, min(config.size, MAX_CONFIG_BYTES + 1)))
    try:
        return parse_config(raw, "the artifact")
    except UnsupportedArchitectureError as error:
        _log.warning("the settings of an artifact cannot be read: %s", error)
        return {}
