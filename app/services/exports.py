"""The result of a finished job in other formats: what is possible."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from app.services.artifact_settings import find_settings, read_settings
from app.services.context import Context
from app.shared.errors import AppError, ConflictError
from app.shared.models import Artifact
from app.shared.repositories import jobs, sources
from app.shared.repositories.sources import Source
from app.shared.requests import SOURCE_EXPORT
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


def check_export(context: Context, kind: LaterExport, source: Source, config: Artifact | None) -> None:
    """Raise an error unless a result can be written in a format that it was not exported in, as far as is known.

    Raises:
        ConflictError: the job has already exported this format.
        UnsupportedExportError: the format cannot hold exactly what the artifact stores.
        UnsupportedArchitectureError: the engine does not run models of this class.
        InvalidConfigError: the engine does not run models in this dtype.
    """
    report = CompressionReport.model_validate(source.report)
    if kind in {export.kind for export in report.exports}:
        raise ConflictError(f"the job has exported {kind} itself; GET /jobs/{source.job.id}/artifacts lists the files")
    _check(context, kind, report, config)


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
