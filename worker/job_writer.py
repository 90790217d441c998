"""From what a job's processes tell to rows, under the lease."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from sqlalchemy.orm import Session

from app.shared.database import Database
from app.shared.errors import DatabaseUnavailableError
from app.shared.repositories import outputs, profiles
from app.shared.repositories.leases import Lease
from rocket_core.allocation.predictor import ModelProfile
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.report.schema import StageReport

Answer = TypeVar("Answer")

_SECONDS_BETWEEN_WRITES = 1.0
_SECONDS_BETWEEN_TRIES = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Where a job is; as `rocket_core.pipeline.Progress`, which loads torch."""

    stage: str
    layer: str | None
    fraction: float
    seconds_left: float | None


class ProgressWriter:
    """Writes what a running job tells.

    Progress is written once a second at most, and lost if the database does not answer; profiles and the allocation
    are written until it does.

    Args:
        database: where to write.
        lease: the right to.
        patience: seconds after which a database that does not answer is an error.
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
        self._last: Step | None = None

    def place(self) -> tuple[str | None, str | None]:
        """Stage and layer being worked on, as far as there are any."""
        return self._stage, self._layer

    def on_progress(self, progress: Step) -> None:
        """Writes where the job is."""
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
                    session, self._lease, stage=progress.stage, progress=progress.fraction, finish_at=finish_at
                )
        except DatabaseUnavailableError as error:
            _log.warning("progress is not written: %s", error)

    def on_stored_file(self) -> None:
        """Says that another file of the result is stored: sending it elsewhere may take long."""
        if self._last is not None:
            self.on_progress(self._last)

    def on_profile(self, position: int, profile: LayerProfile) -> None:
        """Writes a layer's profile, unless an earlier attempt has."""
        self.insist(lambda session: outputs.save_layer_profile(session, self._lease, position, profile))

    def on_profiled(self, profile: ModelProfile) -> None:
        """Writes the profile of the whole model, and what it predicts at every ratio."""
        what_if = profile.what_if()
        found = profile, what_if.frontier(), what_if.reachable_ratio
        self.insist(lambda session: profiles.save_profile(session, self._lease, *found, most=self._max_profiles))

    def on_costs(self, stages: tuple[StageReport, ...]) -> None:
        """Writes what each stage has cost, of a job that has no report to say so."""
        self.insist(lambda session: outputs.save_costs(session, self._lease, stages))

    def on_allocation(self, chosen: Sequence[tuple[str, Candidate]]) -> None:
        """Writes the allocation, unless an earlier attempt has."""
        self.insist(lambda session: outputs.save_allocation(session, self._lease, chosen))

    def insist(self, write: Callable[[Session], Answer]) -> Answer:
        """Writes in a transaction of its own, again and again until the database answers.

        Raises:
            DatabaseUnavailableError: it has not answered for too long.
        """
        until = time.monotonic() + self._patience
        while True:
            try:
                with self._database.transaction() as session:
                    return write(session)
            except DatabaseUnavailableError as error:
                if time.monotonic() > until:
                    raise
                _log.warning("trying again: %s", error)
                time.sleep(_SECONDS_BETWEEN_TRIES)
