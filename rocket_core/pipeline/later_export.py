"""The export of a job's artifact in another format, with a report that describes it alone."""

import math
from collections import Counter
from pathlib import Path

from rocket_core.checkpoint import open_checkpoint
from rocket_core.engines import LaterExport
from rocket_core.errors import CompressionCancelledError, CorruptCheckpointError
from rocket_core.exports.artifact_folder import REPORT_NAME, read_report, write_report
from rocket_core.exports.conversion import export_artifact
from rocket_core.pipeline.observer import Observer, Progress
from rocket_core.report.schema import CompressionReport

# For each number of the largest tensor: its codes or factors, the weight in float32, and as it is written.
_BYTES_PER_NUMBER = 16
_SILENT = Observer()


def export_result(
    artifact: Path,
    output: Path,
    kind: LaterExport,
    *,
    observer: Observer = _SILENT,
) -> CompressionReport:
    """Write an artifact in another format into `output/KIND`, and the report of its compression next to it.

    An export that an earlier call has completed is kept; one that it left incomplete is written again.

    Args:
        artifact: folder of the artifact, with its report.
        output: an existing folder.
        kind: the format; see `export_artifact`.
        observer: notified of the estimated bytes of memory, and before each tensor.

    Returns:
        The report of the compression, with this export as the only one.

    Raises:
        CompressionCancelledError: the observer has cancelled it.
        RocketError: see `export_artifact`.
    """
    report = read_report(artifact)
    if report is None:
        raise CorruptCheckpointError(f"{artifact} has no {REPORT_NAME}; compress the model again")
    observer.on_requirements(_BYTES_PER_NUMBER * _largest_tensor(artifact, report))

    def on_step(share: float, _tensor: str) -> None:
        if observer.should_cancel():
            raise CompressionCancelledError("cancelled while the export was written")
        observer.on_progress(Progress(stage="exporting", layer=None, fraction=min(share, 1.0), seconds_left=None))

    folder = output / kind
    # It appears when it is complete.
    if not folder.is_dir():
        on_step(0.0, "")
        export_artifact(artifact, folder, kind, on_step=on_step)
    written = read_report(folder)
    assert written is not None, "the artifact has a report, so its export has one"
    (made,) = (export for export in written.exports if export.kind == kind)
    totals = report.totals.model_copy(update={"stored_bytes": made.stored_bytes})
    described = report.model_copy(update={"exports": (made,), "totals": totals})
    write_report(output, described)
    return described


def _largest_tensor(artifact: Path, report: CompressionReport) -> int:
    """Return the most numbers that a tensor of the artifact or of an export of it has."""
    sizes = Counter({key: math.prod(entry.shape) for key, entry in open_checkpoint(artifact).entries.items()})
    for layer in report.layers:
        # A dense export may have the weights of all experts of a block in one tensor.
        name = layer.name if layer.routed_tokens is None else layer.name.rsplit(".", 2)[0]
        sizes[f"{name} (dense)"] += layer.d_in * layer.d_out
    return max(sizes.values(), default=0)
