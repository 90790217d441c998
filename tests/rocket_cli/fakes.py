"""Stand-ins for the library: a report, and a pipeline that does no work."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.config import CompressionConfig
from rocket_core.report.calibration import CalibrationReport
from rocket_core.report.layer_description import layer_report
from rocket_core.report.schema import (
    AllocationReport,
    CompressionReport,
    ExportReport,
    LayerOutcome,
    StageReport,
    TotalsReport,
)
from rocket_core.report.verdict import MeasuredBound, Verdict

_BOUND = MeasuredBound(name="max_kl", bound=0.05, measured=0.5)
REGRESSED = Verdict(outcome="regressed", bounds=(_BOUND,), reasons=(_BOUND.text,))


@dataclass
class Outcome:
    """The result of a command."""

    code: int
    out: str
    err: str


@dataclass
class FakeProgress:
    stage: str
    layer: str | None
    fraction: float
    seconds_left: float | None


@dataclass
class FakePipeline:
    """Stands in for `rocket_core.pipeline`: records calls, and answers with a report or an error."""

    answer: CompressionReport | BaseException
    progress: tuple[FakeProgress, ...] = ()
    calls: list[dict[str, Any]] = field(default_factory=list)

    def compress(self, model: str, output: Path, config: CompressionConfig, **options: Any) -> CompressionReport:
        self.calls.append({"model": model, "output": output, "config": config, **options})
        for progress in self.progress:
            options["observer"].on_progress(progress)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def build_report(blocks: int = 2) -> CompressionReport:
    """Return a report of `blocks` blocks of a factored and a dense layer; its numbers are easy to check by hand."""
    layers = []
    for block in range(blocks):
        for name, d_in, d_out, kind in (("attn.q_proj", 1000, 1000, "factored"), ("mlp.up_proj", 1000, 2000, "dense")):
            full = f"model.layers.{block}.{name}"
            dense = Candidate(
                kind="dense",
                kept_parameters=d_in * d_out,
                stored_bytes=2 * d_in * d_out,
                reconstruction_error=0,
                weight_error=0,
            )
            factored = Candidate(
                kind="factored",
                rank=200,
                nnz=50_000,
                kept_parameters=250_000,
                stored_bytes=525_000,
                reconstruction_error=0.125,
                weight_error=0.375,
            )
            profile = LayerProfile(
                name=full, d_in=d_in, d_out=d_out, input_group=full, tokens=1, candidates=(dense, factored)
            )
            outcome = LayerOutcome(nnz=50_000, kept_parameters=250_000, stored_bytes=525_000, achieved_error=0.125)
            chosen = (factored, outcome) if kind == "factored" else (dense, None)
            layers.append(layer_report(profile, *chosen))
    return CompressionReport(
        rocket_version="0.1.0",
        fingerprint="0" * 64,
        model="some/model",
        revision=None,
        settings=CompressionConfig(ratio=0.25),
        calibration=CalibrationReport(
            dataset="builtin", samples=1, sequence_length=2, seed=0, tokens=2, token_sha256="0" * 64
        ),
        stages=(
            StageReport(name="preflight", seconds=2.5, peak_memory_bytes=1_000_000),
            StageReport(name="calibrating", seconds=70, peak_memory_bytes=3_500_000),
        ),
        allocation=AllocationReport(
            objective="weight",
            budget=9,
            alpha=1.0,
            smallest_alpha=1.0,
            reference_error=1.0,
            total_error=1.0,
            lower_bound=1.0,
            proven=True,
        ),
        totals=TotalsReport(
            compressible_parameters=3_000_000 * blocks,
            kept_parameters=2_250_000 * blocks,
            achieved_ratio=0.25,
            model_parameters=4_000_000 * blocks,
            model_compression_ratio=0.1875,
            stored_bytes=12_340_000,
            dense_bytes=16_000_000,
        ),
        exports=(
            ExportReport(kind="rocket", folder="rocket", stored_bytes=12_340_000),
            ExportReport(kind="dense", folder="dense", stored_bytes=16_000_000),
        ),
        layers=tuple(layers),
        skipped={"model.layers.0.gate": "never called", "model.layers.1.gate": "never called"},
    )
