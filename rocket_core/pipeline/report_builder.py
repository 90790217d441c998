"""Parts of the report, built from the parts of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rocket_core.allocation import Allocation, layer_frontiers
from rocket_core.allocation.predictor import ModelProfile
from rocket_core.calibration.inputs import DecoderText
from rocket_core.calibration.media_text import MediaWithText
from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.candidates import Candidate, FrontierPoint, LayerProfile
from rocket_core.config import HUB_TASKS, CalibrationKind, CompressionConfig
from rocket_core.inspection.files.dataset_names import local_path_of
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.format_groups import format_groups
from rocket_core.pipeline.stages.artifact_size import bytes_beside
from rocket_core.pipeline.stages.profile import Profiled, objective_of
from rocket_core.pipeline.state.records import RefinedBlock, RunIdentity
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.calibrated_text import CalibratedText
from rocket_core.report.calibration import NO_DATASET, CalibrationReport
from rocket_core.report.layer_description import layer_report
from rocket_core.report.quality import EvaluationReport
from rocket_core.report.schema import (
    AllocationReport,
    BlockReport,
    ExportReport,
    LayerOutcome,
    LayerReport,
    TotalsReport,
)
from rocket_core.report.verdict import Verdict, judge
from rocket_core.sizes import budget

# Models of more layers are mixtures, whose report would mostly consist of frontiers.
_MAX_FRONTIERS = 2000


def calibration_report(run: Run, inputs: CalibrationInputs, work: WorkFolder) -> CalibrationReport:
    """Return the report on the run's calibration data."""
    calibration = without_paths(run.config).calibration
    read = [ids.flatten() for ids in inputs.token_ids if ids.numel()]
    return CalibrationReport(
        kind=_kind(run),
        dataset=calibration.dataset if run.config.calibrates else NO_DATASET,
        samples=len(inputs),
        sequence_length=run.sequence_length,
        seed=calibration.seed,
        tokens=inputs.positions(run.positions),
        token_sha256=inputs.sha256(),
        text=_text(run, work),
        skipped_rows=inputs.rows.skipped,
        lacks_chats=isinstance(run.inputs, DecoderText)
        and bool(run.inputs.tokenizer.chat_template)
        and inputs.rows.chats == 0,
        reached_tokens=int(torch.cat(read).bincount().count_nonzero()) if read else None,
        vocabulary=run.architecture.vocabulary if read else None,
    )


def _kind(run: Run) -> CalibrationKind:
    if not isinstance(run.inputs, MediaWithText):
        return run.architecture.kind
    return "text and images" if run.inputs.medium == "image" else "text and audio"


def _text(run: Run, work: WorkFolder) -> CalibratedText | None:
    # The decoder of an encoder-decoder reads text that does not belong to what its encoder reads.
    return work.text() if run.architecture.is_causal and run.architecture.kind == "text" else None


def without_paths(config: CompressionConfig) -> CompressionConfig:
    """Return the settings without paths of this machine, because reports are published with the model."""
    calibration = config.calibration.model_copy(update={"dataset": _without_folder(config.calibration.dataset)})
    evaluate = config.evaluate
    if evaluate is not None:
        tasks = tuple(name if name in HUB_TASKS else Path(name).name for name in evaluate.tasks)
        evaluate = evaluate.model_copy(update={"dataset": _without_folder(evaluate.dataset), "tasks": tasks})
    return config.model_copy(update={"calibration": calibration, "evaluate": evaluate})


def _without_folder(dataset: str) -> str:
    path = local_path_of(dataset)
    return dataset if path is None else path.name


def model_profile(run: Run, identity: RunIdentity, profiled: Profiled, work: WorkFolder) -> ModelProfile:
    """Return the profile of a run's model.

    Args:
        run: the run.
        identity: see `profile_identity`.
        profiled: profiles of all layers and tables.
        work: work folder in which they are.
    """
    names = [profile.name for profile in (*profiled.profiles, *profiled.tables)]
    dense_tables = sum(table.candidates[0].stored_bytes for table in profiled.tables)
    return ModelProfile(
        fingerprint=identity.fingerprint,
        model=identity.model,
        revision=identity.revision,
        settings=identity.settings,
        objective=objective_of(run.config),
        budget_unit=run.config.budget,
        cap_slack=run.config.cap_slack,
        itemsize=run.dtype.itemsize,
        model_parameters=run.architecture.parameters,
        dense_bytes=run.checkpoint.stored_bytes,
        other_bytes=bytes_beside(run, names) + dense_tables,
        layers=profiled.profiles,
        tables=profiled.tables,
        ratio_counts_tables=run.config.ratio_counts_tables,
        format_groups=format_groups(run, profiled.profiles),
        text=_text(run, work),
    )


def allocation_report(allocation: Allocation) -> AllocationReport:
    """Return the report on the knapsack's result."""
    shared = AllocationReport.model_fields.keys() & Allocation.model_fields.keys()
    return AllocationReport(measure=allocation.budget_unit, **allocation.model_dump(include=shared))


def layer_reports(
    allocation: Allocation,
    decided: Sequence[LayerProfile],
    selected: Sequence[tuple[LayerProfile, Candidate]],
    work: WorkFolder,
    refined: Mapping[int, RefinedBlock],
) -> tuple[LayerReport, ...]:
    """Return the reports on all layers.

    Args:
        allocation: the knapsack's result.
        decided: profiles of the layers that it decided about.
        selected: every layer with its candidate.
        work: work folder with the outcomes.
        refined: refined blocks by index.
    """
    frontiers: Mapping[str, tuple[FrontierPoint, ...]] = {}
    if len(decided) <= _MAX_FRONTIERS:
        frontiers = layer_frontiers(decided, allocation.objective, allocation.budget_unit)
    stored = {name: size for block in refined.values() for name, size in block.stored_bytes.items()}
    return tuple(
        layer_report(layer, candidate, _outcome(work, layer.name, stored), frontiers.get(layer.name, ()))
        for layer, candidate in selected
    )


def _outcome(work: WorkFolder, layer: str, stored_bytes: Mapping[str, int]) -> LayerOutcome | None:
    """Return the outcome of a layer, with its bytes after refinement if it was refined."""
    outcome = work.outcome(layer)
    if outcome is None or layer not in stored_bytes:
        return outcome
    return outcome.model_copy(update={"stored_bytes": stored_bytes[layer]})


def block_reports(run: Run, refined: Mapping[int, RefinedBlock]) -> tuple[BlockReport, ...]:
    """Return the reports on refined blocks, in model order."""
    return tuple(
        BlockReport(
            name=run.architecture.block_name(index), error_before=record.error_before, error_after=record.error_after
        )
        for index, record in refined.items()
    )


def totals_report(run: Run, layers: Sequence[LayerReport], exports: Sequence[ExportReport]) -> TotalsReport:
    """Return the report on sizes before and after."""
    compressible = sum(layer.d_in * layer.d_out for layer in layers)
    kept = sum(layer.kept_parameters for layer in layers)
    total = run.architecture.parameters
    return TotalsReport(
        compressible_parameters=compressible,
        kept_parameters=kept,
        achieved_ratio=budget.achieved_ratio(compressible, kept),
        achieved_byte_ratio=budget.achieved_ratio(
            sum(run.original_bytes(layer.name) for layer in layers), sum(layer.stored_bytes for layer in layers)
        ),
        model_parameters=total,
        model_compression_ratio=budget.achieved_ratio(total, budget.remaining_parameters(total, compressible, kept)),
        stored_bytes=min(export.stored_bytes for export in exports),
        dense_bytes=run.checkpoint.stored_bytes,
        original_bits=run.checkpoint.coded_bits,
    )


def verdict(
    config: CompressionConfig,
    evaluation: EvaluationReport | None,
    allocation: Allocation,
    exports: Sequence[ExportReport],
) -> Verdict | None:
    """Return the verdict on the measured quality; None unless bounds were given."""
    if config.accept is None:
        return None
    assert evaluation is not None, "bounds without an evaluation are refused"
    # Rounding the numbers that layers keep costs error that no profile predicts.
    is_predicted = allocation.objective == "fisher" and not config.rounds_values
    loadings = [export.loading for export in exports if export.loading is not None]
    return judge(config.accept, evaluation, allocation.total_error if is_predicted else None, loadings)
