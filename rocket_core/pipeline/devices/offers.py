"""Work on blocks that a run offers to processes that it has not started, on machines that share its work folder.

    offer.json             settings of the run, and what is done with blocks at present
    helpers/NAME.working   exists while a process of this name works on blocks; touched every few seconds
    helpers/NAME.json      what that took, until the run has read it

The run does not depend on them. Blocks that a process leaves unfinished, because it has died or is silent for too long,
are done by the run itself; if both do one, they write the same bytes.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rocket_core.pipeline.devices.messages import Offer
from rocket_core.pipeline.state.files import find_model, read_model, write_model
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.schema import StageReport

TOUCH_SECONDS = 5.0
"""How often a process reports that it is working."""
PATIENCE_SECONDS = 60.0
"""How long the run waits for a process that does not."""
_LOOK_SECONDS = 0.1
_WORKING = ".working"


class Offers:
    """What a run offers, seen from the run and from the processes that help it.

    Args:
        work: work folder of the run.
    """

    def __init__(self, work: WorkFolder) -> None:
        self._file = work.path / "offer.json"
        self._helpers = work.path / "helpers"

    def publish(self, offer: Offer) -> None:
        """Offer work, or say that there will be some."""
        self._helpers.mkdir(exist_ok=True)
        write_model(self._file, offer)

    def withdraw(self) -> None:
        """Offer nothing any more, so that processes that wait for work end."""
        self._file.unlink(missing_ok=True)

    def find(self) -> Offer | None:
        """Return what the run offers; None if it does not, or has ended."""
        with suppress(FileNotFoundError):
            return find_model(self._file, Offer)
        return None

    def wait(self, pulse: Callable[[], None], *, most: float) -> None:
        """Wait until no process works on blocks any more, except those that have been silent for too long.

        Args:
            pulse: called meanwhile; what it raises ends the wait.
            most: seconds after which not even a process that is not silent is waited for; at least those of patience.
        """
        until = time.monotonic() + max(most, PATIENCE_SECONDS)
        # By this machine's clock, as those of others may differ.
        seen: dict[Path, tuple[float, float]] = {}
        while True:
            now = time.monotonic()
            changed = {file: at for file in self._helpers.glob(f"*{_WORKING}") if (at := _changed_at(file)) is not None}
            seen = {file: seen[file] if seen.get(file, (None,))[0] == at else (at, now) for file, at in changed.items()}
            if now > until or all(now - since > PATIENCE_SECONDS for _, since in seen.values()):
                for file in seen:
                    # A process that is alive nevertheless creates it again.
                    file.unlink(missing_ok=True)
                return
            pulse()
            time.sleep(_LOOK_SECONDS)

    def take_costs(self) -> list[StageReport]:
        """Return, once, what the work of other processes took."""
        costs = []
        for file in sorted(self._helpers.glob("*.json")):
            costs.append(read_model(file, StageReport))
            file.unlink()
        return costs

    @contextmanager
    def taking_part(self, name: str) -> Iterator[Callable[[StageReport], None]]:
        """Tell the run, while the context is active, that this process works on blocks.

        Args:
            name: unique name of the process.

        Yields:
            A function that takes what the work needed.
        """
        file, ended = self._helpers / f"{name}{_WORKING}", threading.Event()

        def touch() -> None:
            while not ended.wait(TOUCH_SECONDS):
                with suppress(OSError):
                    file.touch()

        file.touch()
        thread = threading.Thread(target=touch, name="helper", daemon=True)
        thread.start()
        try:
            yield lambda cost: write_model(self._helpers / f"{name}.json", cost)
        finally:
            ended.set()
            thread.join()
            file.unlink(missing_ok=True)


def _changed_at(file: Path) -> float | None:
    with suppress(FileNotFoundError):
        return file.stat().st_mtime
    return None
