"""Whether the service can do its work."""

import os
import shutil

from app.services.context import Context
from app.shared.errors import DatabaseUnavailableError

# Less would not take the rows of one job.
_LEAST_FREE_BYTES = 2**24


def missing_dependencies(context: Context) -> list[str]:
    """What keeps the service from accepting jobs, for people; the broker is not among it, as polling replaces it."""
    missing = []
    try:
        if not context.database.is_current():
            missing.append("database: its schema is not that of this version; run the migrations")
    except DatabaseUnavailableError as error:
        missing.append(f"database: {error}")
    if not os.access(context.settings.data_dir, os.W_OK | os.X_OK):
        missing.append("data folder: it cannot be written")
    elif shutil.disk_usage(context.settings.data_dir).free < _LEAST_FREE_BYTES:
        missing.append("data folder: its disk is full")
    return missing
