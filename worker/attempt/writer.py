"""Writing what a job's processes report to the database, under the lease."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy.orm import Session

from app.shared.database import Database
from app.shared.errors import DatabaseUnavailableError
from app.shared.repositories import outputs, profiles
from app.shared.repositories.leases import Lease
from rocket_core.allocation.predictor import ModelProfile
from worker.confined.messages import Advanced

Answer = TypeVar("Answer")
Arguments = ParamSpec("Arguments")

_SECONDS_BETWEEN_WRITES = 1.0
_SECONDS_BETWEEN_TRIES = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Progress of a job in a stage that no run of the library has, with the same fields as `Advanced`."""

    stage: str
    layer: str | None
    fraction: float
    seconds_left: float | None


class ProgressWriter:
    """Writer of what a running job reports.

    Progress is written at most once per second, and lost while the database is unavailable; everything else is retried.

    Args:
        database: the database.
        lease: lease on the job.
        patience: seconds after which an unavailable database is an error.
        max_profiles: how many profiles a tenant may have.
    """

    def __init__(self, database: Database, lease: Lease, *, patience: float, max_profiles: int) -> None:
        self._database = database
        self._lease = lease
        self._patience = patience
        self._max_profiles = max_profiles
        self._written_at = float("-inf")
        self._stage: str | None = None
        self._layer: str | None = None
        self._last: Step | Advanced | None = None

    def location(self) -> tuple[str | None, str | None]:
        """Return the current stage and layer; each is None if unknown."""
        return self._stage, self._layer

    def on_progress(self, progress: Step | Advanced) -> None:
        """Write the job's progress."""
        self._last = progress
        is_new_stage = progress.stage != self._stage
        self._stage, self._layer = progress.stage, progress.layer
        if not is_new_stage and time.monotonic() - self._written_at < _SECONDS_BETWEEN_WRITES:
            return
        self._written_at = time.monotonic()
        finish_at = None
        if progress.seconds_left is not None:
            finish_at = datetime.now(UTC) + timedelta(seconds=progress.seconds_left)
        try:
            with self._database.transaction() as session:
                outputs.report_progress(
                    session,
                    self._lease,
                    stage=progress.stage,
                    progress=progress.fraction,
                    finish_at=finish_at,
                    layer=progress.layer,
                )
        except DatabaseUnavailableError as error:
            _log.warning("progress is not written: %s", error)

    def on_stored_file(self) -> None:
        """Write that the job is still active after a file of the result is stored, as an upload may take long."""
        if self._last is not None:
            self.on_progress(self._last)

    def on_profiled(self, profile: ModelProfile) -> None:
        """Write the profile of the whole model, and its predictions at every ratio."""
        predictor = profile.predictor()
        prediction = profile, predictor.frontier(), predictor.reachable_ratio
        self.write(profiles.save_profile, *prediction, most=self._max_profiles)

    def write(
        self,
        write: Callable[Concatenate[Session, Lease, Arguments], Answer],
        *arguments: Arguments.args,
        **options: Arguments.kwargs,
    ) -> Answer:
        """Write under the lease in a separate transaction, and retry until the database answers.

        Args:
            write: writes, given a session and the lease.
            arguments: what it takes after those.
            options: the same, by name.

        Raises:
            DatabaseUnavailableError: the database was unavailable for too long.
            FencedOutError: the job was taken away.
        """
        until = time.monotonic() + self._patience
        while True:
            try:
                with self._database.transaction() as session:
                    return write(session, self._lease, *arguments, **options)
            except DatabaseUnavailableError as error:
                if time.monotonic() > until:
                    raise
                _log.warning("trying again: %s", error)
                time.sleep(_SECONDS_BETWEEN_TRIES)
