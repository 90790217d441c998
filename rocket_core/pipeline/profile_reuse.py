"""The cached profile of one run."""

from dataclasses import dataclass
from pathlib import Path

from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.errors import InsufficientDiskError
from rocket_core.estimates.footprint import ResourceEstimate
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.requirements import check_resources
from rocket_core.pipeline.state.profile_cache import ProfileCache
from rocket_core.pipeline.state.records import RunIdentity
from rocket_core.pipeline.state.work_folder import WorkFolder


@dataclass(frozen=True, slots=True)
class RunProfileCache:
    """The cached profile of one run; all methods are no-ops without a cache.

    Attributes:
        profiles: the profile cache; None disables it.
        identity: see `profile_identity`.
    """

    profiles: ProfileCache | None
    identity: RunIdentity

    def inputs(self, work: WorkFolder) -> CalibrationInputs | None:
        """Return the calibration inputs of the cached profile, for a run that has not drawn any yet."""
        return None if self.profiles is None or work.is_claimed else self.profiles.inputs(self.identity)

    def check_resources(self, run: Run, inputs: CalibrationInputs, output: Path, *, held: int) -> ResourceEstimate:
        """Call the function of that name; remove cached profiles if the disk is too small for both."""
        while True:
            try:
                return check_resources(run, inputs, output, held=held)
            except InsufficientDiskError:
                if self.profiles is None or not self.profiles.evict_oldest():
                    raise

    def restore_into(self, work: WorkFolder, inputs: CalibrationInputs) -> None:
        """Copy the cached profile to the work folder if it has the same inputs and the run has not allocated yet."""
        if self.profiles is None or work.allocation() is not None:
            return
        cached_inputs = self.profiles.inputs(self.identity)
        if cached_inputs is not None and cached_inputs.equals(inputs):
            self.profiles.restore_into(self.identity, work)

    def store(self, work: WorkFolder) -> None:
        """Cache the profile of the run."""
        if self.profiles is not None:
            self.profiles.store(self.identity, work)
