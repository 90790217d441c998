"""The report of a compression that did nothing, for tests that need any report; loads no torch."""

from rocket_core.candidates import CandidateKind
from rocket_core.config import CompressionConfig
from rocket_core.report.calibration import CalibrationReport
from rocket_core.report.schema import (
    AllocationReport,
    CompressionReport,
    ExportReport,
    LayerReport,
    StageReport,
    TotalsReport,
)


def empty_report() -> CompressionReport:
    """Return a report without layers."""
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


def layer_named(name: str, *, kept: int = 40, kind: CandidateKind = "factored") -> LayerReport:
    """Return a layer of 8 by 8 from which something was removed."""
    return LayerReport(
        name=name,
        kind=kind,
        d_in=8,
        d_out=8,
        rank=2 if kind == "factored" else None,
        nnz=kept - 16 if kind == "factored" else None,
        sparsity=None,
        rank_nnz_ratio=None,
        kept_parameters=kept,
        stored_bytes=4 * kept,
        compression_ratio=1 - kept / 64,
        reconstruction_error=0.1,
        weight_error=0.2,
        achieved_error=0.0 if kind == "dense" else 0.09,
        input_group=name,
    )


def report_of_layers() -> CompressionReport:
    """Return a report of two blocks with a dense and a factored layer each."""
    layers = [
        layer_named(f"model.layers.{block}.{name}", kept=kept, kind=kind)
        for block in range(2)
        for name, kept, kind in (("self_attn.q_proj", 64, "dense"), ("mlp.up_proj", 40, "factored"))
    ]
    stages = (StageReport(name="preflight", seconds=1.5, peak_memory_bytes=10**8),)
    exports = (ExportReport(kind="rocket", folder="rocket", stored_bytes=832),)
    return empty_report().model_copy(update={"layers": tuple(layers), "stages": stages, "exports": exports})
