"""Arguments and answers of the tools for agents, with units in their descriptions."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

from pydantic import Field

from rocket_cli.job_target import target_text
from rocket_client.errors import InvalidArgumentError
from rocket_client.models import Frontier, Job
from rocket_core.config import AcceptanceConfig, Preset, stage_label
from rocket_core.engines import EngineName
from rocket_core.report.figures import ERROR_NAMES
from rocket_core.report.formatting import bytes_text
from rocket_core.report.headlines import measured_quality, quality_headline
from rocket_core.report.quality import EvaluationReport
from rocket_core.report.schema import CompressionReport, LayerReport
from rocket_core.report.verdict import Verdict
from rocket_core.schema import FrozenModel
from rocket_core.sizes.memory_fit import MemoryFit

_WORST_LAYERS = 5
# Every fifth of a hundred points, and the last.
_STEP = 5


class ModelRequest(FrozenModel):
    """A model, and how to read and compress it; what is left out takes the service's defaults."""

    model_id: str
    """`local/NAME` or `upload/NAME` as `models` lists them, or `namespace/name` on the Hugging Face Hub."""
    revision: str | None = None
    """branch, tag or commit of a repository on the Hub."""
    preset: Preset | None = None
    """how much time to spend on quality, from least to most: instant (no calibration text), fast (the default), best,
    max; `paper` is the published method.
    """
    engine: EngineName | None = None
    """program that must read the result: llama.cpp (one GGUF file), vllm, vllm-int8, vllm-fp8 or vllm-nvfp4
    (vLLM on processors that multiply these), mlx, onnx (ONNX Runtime), or by default rocket (transformers).
    """
    calibration_dataset: str | None = None
    """text that it is calibrated on, best like what the model will read: `builtin` (the default), `local/FILE` or
    `upload/ID` of the service, or `namespace/name:split` on the Hub.
    """
    calibration_samples: Annotated[int, Field(ge=1)] | None = None
    """windows of that text; fewer take less time, and cost quality."""

    def profile_arguments(self) -> dict[str, Any]:
        """Return the arguments of the client's `profile`, for targets in bytes or bits."""
        arguments = self._shared_arguments()
        return arguments | {"options": {"budget": "bytes", **arguments["options"]}}

    def _shared_arguments(self) -> dict[str, Any]:
        calibration = {"dataset": self.calibration_dataset, "samples": self.calibration_samples}
        options = {"preset": self.preset, "engine": self.engine}
        return {
            "model_id": self.model_id,
            "revision": self.revision,
            "calibration": {name: value for name, value in calibration.items() if value is not None},
            "options": {name: value for name, value in options.items() if value is not None},
        }


class CompressionRequest(ModelRequest):
    """A model and exactly one target: ratio, target_bytes, bits, fit, max_kl or max_perplexity_increase."""

    ratio: float | None = None
    """target: fraction of the compressible parameters to remove, from 0 to below 1."""
    target_bytes: int | None = None
    """target: most bytes that the files for the engine may take; 1 MB is 1000000."""
    bits: float | None = None
    """target: most bits per weight of the compressible layers, above 0 and up to 16."""
    fit: MemoryFit | None = None
    """target: the memory of the device that runs the result, with the context that it has to hold as well."""
    max_kl: float | None = None
    """target: smallest files whose measured KL divergence from the original is at most this, in nats per token."""
    max_perplexity_increase: float | None = None
    """target: the same for the increase of the perplexity, as a fraction: 0.02 is 2%."""
    evaluate: bool = True
    """whether the result is measured next to the original; without it, its quality is only predicted."""
    accept: AcceptanceConfig | None = None
    """bounds on what is measured; the report then has a verdict. Does not change the result."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that the client's `submit` and `estimate` have in common."""
        return self._shared_arguments() | {
            "ratio": self.ratio,
            "target_bytes": self.target_bytes,
            "bits": self.bits,
            "fit": None if self.fit is None else self.fit.model_dump(exclude_none=True),
            "max_kl": self.max_kl,
            "max_perplexity_increase": self.max_perplexity_increase,
            "evaluate": {} if self.evaluate else None,
            "accept": None if self.accept is None else self.accept.model_dump(exclude_none=True),
        }


class JobState(FrozenModel):
    """A job as it is now, and what to do next."""

    job_id: str
    """id of the job."""
    kind: str
    """compression, profile, healing, evaluation, export or push."""
    model_id: str
    """the model."""
    target: str
    """what the job was asked for."""
    status: str
    """queued, running, cancelling, succeeded, failed or cancelled."""
    stage: str | None
    """what a running job does now."""
    progress: float
    """progress of the whole job, from 0 to 1."""
    estimated_finish_at: datetime | None
    """when it is expected to end, if that is known."""
    error: str | None
    """why it failed, and what to do."""
    stored_bytes: int | None
    """bytes of the compressed weights."""
    dense_bytes: int | None
    """bytes of the original weights."""
    quality: str | None
    """quality of the result, such as the perplexity before and after."""
    quality_is_measured: bool
    """whether the quality was measured; otherwise it is predicted."""
    verdict: str | None
    """whether the bounds of `accept` hold, with the numbers."""
    next_step: str
    """what to do next."""


class ReachableSize(FrozenModel):
    """A size that the model can have."""

    model_bytes: int
    """bytes of all weights of the model."""
    predicted_error: float
    """predicted error at this size, in the unit that `error_means` names; 0 is that of the original."""


class ReachableSizes(FrozenModel):
    """Sizes that a profiled model can have, from the largest to the smallest."""

    profile_id: str
    """the profile."""
    model_id: str
    """the model."""
    dense_bytes: int
    """bytes of the original weights."""
    error_means: str
    """what `predicted_error` is."""
    sizes: tuple[ReachableSize, ...]
    """some sizes if only the linear layers are compressed; those between them are reachable as well."""
    next_step: str
    """what to do next."""


class Result(FrozenModel):
    """What a compression achieved."""

    job_id: str
    """the job."""
    model: str
    """the model."""
    stored_bytes: int
    """bytes of the compressed weights."""
    dense_bytes: int
    """bytes of the original weights."""
    change: str
    """what became of the linear layers."""
    quality: str
    """quality in words, measured or predicted, and on which text."""
    kl_divergence: float | None
    """measured KL divergence from the original, nats per token; null if it was not measured."""
    perplexity_before: float | None
    """measured perplexity of the original."""
    perplexity_after: float | None
    """measured perplexity of the compressed model."""
    verdict: str | None
    """accepted, regressed or anomalous, with the numbers; null if no bounds were given."""
    seconds: float
    """time that it took."""
    exports: dict[str, int]
    """bytes of each kind of files that `download` and `push` take as `export`."""


class WorstLayer(FrozenModel):
    """A layer that costs much quality."""

    name: str
    """module name."""
    stored_as: str
    """how it is stored."""
    bits_per_weight: float | None
    """bits on disk for each weight that it had."""
    output_error: float
    """relative error of its output on the calibration text."""
    predicted_loss: float | None
    """predicted increase of the model's loss because of it, nats per token; null if it was not estimated."""


class ShortReport(Result):
    """The report of a compression in short."""

    warnings: tuple[str, ...]
    """what the service noticed when the job was submitted."""
    worst_layers: tuple[WorstLayer, ...]
    """the layers that cost most, worst first."""
    next_step: str
    """what to do next."""


class Downloaded(FrozenModel):
    """Files that were downloaded, each verified by its SHA-256."""

    folder: str
    """folder that has them, on the machine that runs `rocket mcp`."""
    files: dict[str, int]
    """bytes of each file."""


def job_state(job: Job) -> JobState:
    """Return a job as agents see it."""
    result = job.result
    verdict = None if result is None or result.verdict is None else result.verdict.text
    return JobState(
        job_id=job.id,
        kind=job.kind,
        model_id=job.model_id,
        target=target_text(job),
        status=job.status,
        stage=None if job.stage is None else stage_label(job.stage),
        progress=job.progress,
        estimated_finish_at=job.estimated_finish_at,
        error=None if job.error is None else job.error.message,
        stored_bytes=None if result is None else result.stored_bytes,
        dense_bytes=None if result is None else result.dense_bytes,
        quality=None if result is None else result.quality,
        quality_is_measured=result is not None and result.quality_is_measured,
        verdict=verdict,
        next_step=_next_step(job),
    )


def reachable_sizes(profile_id: str, model_id: str, frontier: Frontier) -> ReachableSizes:
    """Return a frontier as agents see it."""
    points = list(frontier.data[::_STEP])
    if frontier.data and points[-1] is not frontier.data[-1]:
        points.append(frontier.data[-1])
    return ReachableSizes(
        profile_id=profile_id,
        model_id=model_id,
        dense_bytes=frontier.dense_bytes,
        # A newer server may have other objectives.
        error_means=next(
            (text for name, text in ERROR_NAMES.items() if name == frontier.objective), frontier.objective
        ),
        sizes=tuple(ReachableSize(model_bytes=point.model_bytes, predicted_error=point.error) for point in points),
        next_step="call submit with target_bytes; it reuses the profile if the other settings are the same, and may do "
        "better than predicted here, as it also quantizes embeddings",
    )


def compared_result(job: Job, report: CompressionReport, evaluation: EvaluationReport | None) -> Result:
    """Return what a compression achieved.

    Args:
        job: the job.
        report: its report.
        evaluation: what was measured, by the job or later; None if nothing was.
    """
    return Result(**_members(job, report, evaluation))


def short_report(job: Job, report: CompressionReport, evaluation: EvaluationReport | None) -> ShortReport:
    """Return the report of a compression in short; arguments are those of `compared_result`."""
    shown = bytes_text(report.totals.stored_bytes)
    return ShortReport(
        **_members(job, report, evaluation),
        warnings=job.warnings,
        worst_layers=tuple(map(_worst, _by_cost(report.layers)[:_WORST_LAYERS])),
        next_step=f"call download or push for the files ({shown}), or submit with another target or a better preset "
        "and compare both",
    )


def _members(job: Job, report: CompressionReport, evaluation: EvaluationReport | None) -> dict[str, Any]:
    quality = quality_headline(report) if evaluation is None else measured_quality(evaluation)
    verdict: Verdict | None = report.verdict if job.result is None else job.result.verdict
    return {
        "job_id": job.id,
        "model": report.model,
        "stored_bytes": report.totals.stored_bytes,
        "dense_bytes": report.totals.dense_bytes,
        "change": report.change_text,
        "quality": f"{quality.value} ({quality.detail})",
        "kl_divergence": None if evaluation is None else evaluation.difference.kl_divergence,
        "perplexity_before": None if evaluation is None else evaluation.before.perplexity,
        "perplexity_after": None if evaluation is None else evaluation.after.perplexity,
        "verdict": None if verdict is None else verdict.text,
        "seconds": round(report.seconds, 1),
        "exports": {export.kind: export.stored_bytes for export in report.exports},
    }


def _by_cost(layers: Sequence[LayerReport]) -> list[LayerReport]:
    """Return the layers that are not dense, by falling predicted loss, or by their error where that is not known."""
    compressed = [layer for layer in layers if layer.kind != "dense"]
    known = all(layer.loss is not None for layer in compressed)
    return sorted(compressed, key=lambda layer: (layer.loss or 0.0) if known else layer.error, reverse=True)


def _worst(layer: LayerReport) -> WorstLayer:
    return WorstLayer(
        name=layer.name,
        stored_as=layer.block_type or layer.kind,
        bits_per_weight=layer.bits_per_weight,
        output_error=layer.error,
        predicted_loss=layer.loss,
    )


def _next_step(job: Job) -> str:
    if not job.has_ended:
        return "call watch with this job_id until it has ended"
    if job.status != "succeeded":
        retryable = job.error is None or job.error.retryable
        return "submit it again" if retryable else "change what the error names, and submit it again"
    match job.kind:
        case "profile":
            return "call frontier with this job_id: it has the sizes that can be reached"
        case "push":
            return "done: the files are in the repository"
        case "evaluation":
            return "call report with the job that was evaluated"
        case _:
            return "call report with this job_id, then download or push"


def profile_of(job: Job) -> str:
    """Return the id of a job's profile.

    Raises:
        InvalidArgumentError: the job has none.
    """
    if job.profile_id is None:
        raise InvalidArgumentError(
            f"{job.id} is {job.status} and has no profile; a job has one once all layers are profiled, until it is "
            "deleted: call profile with the model to create one"
        )
    return job.profile_id
