"""The result of a finished job in other formats: what is possible, and the jobs that write it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from app.services.artifact_settings import find_settings, read_settings
from app.services.context import Context
from app.shared.errors import AppError, ConflictError
from app.shared.models import Artifact, Job
from app.shared.repositories import exports, jobs, sources
from app.shared.requests import SOURCE_EXPORT, ExportRequest, JobRequest
from rocket_core.engines import ENGINES, Engine, LaterExport
from rocket_core.errors import RocketError, UnsupportedExportError
from rocket_core.exports.exact_layers import (
    StoredForm,
    no_equals,
    stored_differently,
    unlike_neighbour,
    why_not_blocks,
    why_not_packed,
)
from rocket_core.inspection.checks.engine_limits import check_engine
from rocket_core.report.schema import CompressionReport, LayerReport

_MOST = 100
# Engines whose formats hold only some of the ways in which layers are stored; any model has a dense export.
_READERS: Mapping[LaterExport, Engine] = {"gguf": ENGINES["llama.cpp"], "compressed-tensors": ENGINES["vllm"]}
_WIDE = frozenset({"float32", "float64"})


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedExport:
    """A format that a result may be written in.

    Attributes:
        kind: the format.
        refusal: why it cannot be; None if it can, as far as that is known before the weights are read.
    """

    kind: LaterExport
    refusal: str | None


def export_request(context: Context, owner: str, job_id: str, request: ExportRequest) -> JobRequest:
    """Return the request of a job that writes the result of another one in another format.

    Raises:
        JobNotFoundError: the other job does not exist, or is not the tenant's.
        ConflictError: it has not succeeded, has made no result, or has already exported this format.
        ArtifactExpiredError: its artifact has been deleted, or it has exported none that can be converted.
        UnsupportedExportError: the format cannot hold exactly what the artifact stores.
        UnsupportedArchitectureError: the engine does not run models of this class.
        InvalidConfigError: the engine does not run models in this dtype.
    """
    with context.database.snapshot() as session:
        job = jobs.get_job(session, job_id, owner)
        original = JobRequest.model_validate(job.request)
        if original.kind in {"compression", "healing"} and SOURCE_EXPORT not in original.options.export:
            raise UnsupportedExportError(
                f"the job exported {', '.join(original.options.export)}, and only the export {SOURCE_EXPORT} can be "
                f"written in other formats; compress again with the export {request.to}"
            )
        source = sources.find_source(session, owner, job_id, SOURCE_EXPORT)
        config = find_settings(session, source.job, SOURCE_EXPORT)
    report = CompressionReport.model_validate(source.report)
    if request.to in {export.kind for export in report.exports}:
        raise ConflictError(f"the job has exported {request.to} itself; GET /jobs/{job_id}/artifacts lists the files")
    _check(context, request.to, report, config)
    return request.job_request(job_id, original, source.revision if original.is_on_hub else None)


def list_exports(context: Context, owner: str, job_id: str) -> Sequence[Job]:
    """Return the latest jobs that write the result of a job in other formats, newest first.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        return exports.list_exports(session, jobs.get_job(session, job_id, owner), limit=_MOST)


def list_offers(context: Context, owner: str, job_id: str) -> Sequence[OfferedExport]:
    """Return the formats that a result was not exported in yet; empty where there is nothing to export.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        jobs.get_job(session, job_id, owner)
        try:
            source = sources.find_source(session, owner, job_id, SOURCE_EXPORT)
            config = find_settings(session, source.job, SOURCE_EXPORT)
        except AppError:
            return ()
    report = CompressionReport.model_validate(source.report)
    made = {export.kind for export in report.exports}
    return [_offer(context, kind, report, config) for kind in get_args(LaterExport) if kind not in made]


def _offer(context: Context, kind: LaterExport, report: CompressionReport, config: Artifact | None) -> OfferedExport:
    try:
        _check(context, kind, report, config)
    except RocketError as error:
        return OfferedExport(kind=kind, refusal=str(error))
    return OfferedExport(kind=kind, refusal=None)


def _check(context: Context, kind: LaterExport, report: CompressionReport, config: Artifact | None) -> None:
    engine = _READERS.get(kind)
    if engine is None:
        return
    settings = read_settings(context, config)
    itemsize = 4 if (settings.get("dtype") or settings.get("torch_dtype")) in _WIDE else 2
    check_engine(settings, itemsize, engine, report.model)
    reason = _inexact(engine, report)
    if reason is not None:
        raise UnsupportedExportError(
            f"the result cannot be written exactly as {kind}: {reason}; compress {report.model} for {engine.title} "
            f"instead, with the option engine {engine.name!r}"
        )


def _inexact(engine: Engine, report: CompressionReport) -> str | None:
    """Return why an engine's format has no equal of what a result stores; None if it may have one."""
    judge = why_not_packed if engine is ENGINES["vllm"] else why_not_blocks
    stored = {layer.name: _form(layer, report) for layer in report.layers if layer.kind != "dense"}
    found = {name: judge(form) for name, form in stored.items()}
    reasons = {name: reason for name, reason in found.items() if reason is not None}
    if reasons:
        return no_equals(reasons, len(stored))
    if engine is not ENGINES["vllm"]:
        return None
    known = {layer.name for layer in report.layers} | report.skipped.keys()
    unlike = unlike_neighbour(
        {name: (form.bits, form.group_size) for name, form in stored.items()}, lambda name: name in known
    )
    return None if unlike is None else stored_differently(*unlike)


def _form(layer: LayerReport, report: CompressionReport) -> StoredForm:
    return StoredForm(
        d_in=layer.d_in,
        is_codes=layer.kind in {"quantized", "entropy_coded"},
        is_sparse=layer.kind == "sparse",
        is_entropy_coded=layer.kind == "entropy_coded",
        is_table=layer.name in report.tables,
        bits=layer.bits,
        group_size=layer.group_size,
    )
