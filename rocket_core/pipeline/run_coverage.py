"""How much of a model a run compresses."""

from collections.abc import Iterable

from rocket_core.estimates.coverage import Coverage, coverage
from rocket_core.pipeline.context import Run


def coverage_of_run(run: Run) -> Coverage:
    """Return how much of the checkpoint's bytes the run's settings select, and what would select more."""
    architecture = run.architecture
    selected = {name for block in run.layers for name in block}
    return coverage(
        run.config,
        run.checkpoint.weights.decoded_bytes,
        selected=_bytes(run, selected),
        tables=_bytes(run, (table.name for table in run.tables or architecture.tables)),
        tower=_bytes(run, architecture.tower_layers),
        ignored=_bytes(run, (name for block in architecture.layers for name in block if name not in selected)),
    )


def _bytes(run: Run, names: Iterable[str]) -> int:
    entries = (run.loader.entry(f"{name}.weight") for name in names)
    return sum(entry.nbytes for entry in entries if entry is not None)
