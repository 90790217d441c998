"""The report of a compression that has done nothing, where some report is needed; loads no torch."""

from rocket_core.config import CompressionConfig
from rocket_core.report import AllocationReport, CalibrationReport, CompressionReport, TotalsReport


def empty_report() -> CompressionReport:
    """A report without layers."""
    return CompressionReport(
        rocket_version="0",
        fingerprint="f",
        model="local/tiny",
        revision=None,
        settings=CompressionConfig(ratio=0.3),
        calibration=CalibrationReport(
            dataset="builtin", samples=1, sequence_length=2, seed=0, tokens=2, token_sha256="0" * 64
        ),
        stages=(),
        allocation=AllocationReport(
            objective="weight",
            budget=1,
            alpha=None,
            smallest_alpha=None,
            reference_error=None,
            total_error=0.1,
            lower_bound=0.1,
            proven=True,
        ),
        totals=TotalsReport(
            compressible_parameters=1,
            kept_parameters=1,
            achieved_ratio=0.0,
            model_parameters=1,
            model_compression_ratio=0.0,
            stored_bytes=1,
            dense_bytes=1,
        ),
        exports=(),
        layers=(),
        skipped={},
    )
