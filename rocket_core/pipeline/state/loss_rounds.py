"""What a work folder holds of the search for a size whose measured loss is within a bound."""

from collections.abc import Iterable

from rocket_core.allocation import Allocation
from rocket_core.pipeline.state.files import find_model, write_model
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.loss_rounds import LossRound
from rocket_core.schema import FrozenModel


class _Rounds(FrozenModel):
    rounds: tuple[LossRound, ...] = ()


def finished_rounds(work: WorkFolder) -> tuple[LossRound, ...]:
    """Return the sizes that have been tried, in order."""
    return (find_model(work.path / "rounds.json", _Rounds) or _Rounds()).rounds


def save_round(work: WorkFolder, tried: LossRound) -> None:
    """Store a size that has been tried."""
    write_model(work.path / "rounds.json", _Rounds(rounds=(*finished_rounds(work), tried)))


def begin_round(work: WorkFolder, allocation: Allocation, changed: Iterable[str]) -> None:
    """Replace the allocation, once what it changes is removed: layers, refined blocks, artifacts, their evaluation.

    Args:
        work: the work folder.
        allocation: the new allocation.
        changed: layers that are compressed again.
    """
    for layer in changed:
        for file in (f"outcomes/{layer}.json", f"factors/{layer}.safetensors", f"factors/{layer}.json"):
            (work.path / file).unlink(missing_ok=True)
    for pattern in ("refined/*", "exports/*.written", "evaluation.json"):
        for path in work.path.glob(pattern):
            path.unlink()
    work.save_allocation(allocation)
