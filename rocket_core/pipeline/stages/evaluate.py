"""What is measured of the written artifacts, if requested: quality against the dense model, then speed.

It changes no artifact. If it is interrupted, finished artifacts remain, and a resumed run measures again from the start
what was not complete.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rocket_core.calibration.chats import RowReader
from rocket_core.calibration.datasets import (
    document_windows,
    documents,
    file_documents,
    held_out_text,
    token_windows,
)
from rocket_core.calibration.inputs import DecoderText, EncoderText, row_reader
from rocket_core.config import BUILTIN_DATASET, EvaluationConfig
from rocket_core.engines import ExportKind
from rocket_core.errors import EmptyCalibrationError
from rocket_core.evaluation import (
    Measurement,
    ModelFolder,
    check_package,
    compare_models,
    load_tasks,
    open_gguf,
    open_model,
    read_prompts,
    read_text,
)
from rocket_core.inspection.checks.prompts import cannot_judge, cannot_score
from rocket_core.inspection.files.dataset_names import local_path_of
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.stages.healing.plan import windows_to_draw
from rocket_core.pipeline.state.records import EvaluationRecord
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.quality import EvaluationReport
from rocket_core.report.speed import SpeedReport
from rocket_core.speed import SpeedSettings, find_subject, measure_speed

_ORIGINAL = "original"

# Seed for the choice of documents of a dataset that is not used for calibration.
_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPlan:
    """An evaluation with all data that it reads.

    Attributes:
        settings: the requested settings.
        dense: the original model.
        how: the settings of the measurement, and what both models read and answer.
    """

    settings: EvaluationConfig
    dense: ModelFolder
    how: Measurement

    @property
    def of_text(self) -> "EvaluationPlan":
        """The same without tasks and prompts."""
        nothing: dict[str, tuple[()]] = {"tasks": (), "prompts": ()}
        return replace(
            self, settings=self.settings.model_copy(update=nothing), how=replace(self.how, tasks=(), prompts=())
        )


def plan_evaluation(run: Run, *, token: str | None = None) -> EvaluationPlan | None:
    """Load text and tasks before long work starts, so that problems with them are reported early.

    Args:
        run: the run.
        token: the Hub's token, for gated data; None uses that of this machine's user, if any.

    Returns:
        The plan; None if no evaluation is requested.

    Raises:
        InvalidConfigError: a setting does not fit the model, or the harness is not installed.
        CalibrationError: the text is too short or malformed.
        HubUnavailableError: text or tasks cannot be fetched from the Hub.
    """
    settings = run.config.evaluate
    if settings is None:
        return None
    check_package(run.config.evaluated_export)
    dense = open_model(run.source.folder)
    if settings.tasks and not dense.predicts_tokens:
        raise cannot_score(run.source.name)
    if run.config.loss_bounds is not None and not dense.predicts_tokens:
        raise cannot_judge(run.source.name, run.config.loss_bounds)
    prompts = read_prompts(dense, settings.prompts, settings.answer_tokens)
    try:
        text = read_text(
            dense,
            _documents(run, settings, dense.tokenizer, token),
            count=settings.samples,
            sequence_length=settings.sequence_length,
            stride=settings.stride,
        )
    except EmptyCalibrationError as error:
        raise EmptyCalibrationError(f"nothing is left to evaluate on: {error}; see evaluate.dataset") from error
    how = Measurement(
        text=text,
        tasks=load_tasks(settings.tasks),
        task_items=settings.task_items,
        prompts=prompts,
        answer_tokens=settings.answer_tokens,
        device=run.device,
    )
    return EvaluationPlan(settings=settings, dense=dense, how=how)


def evaluate_export(
    run: Run, plan: EvaluationPlan, folders: Mapping[ExportKind, Path], work: WorkFolder, monitor: Monitor
) -> EvaluationReport:
    """Evaluate the artifact that the engine reads, or the dense one if that is the only one, against the original.

    Args:
        run: the run.
        plan: the planned evaluation.
        folders: the written artifacts.
        work: work folder for the result and, temporarily, the dense model's logits.
        monitor: notified of every batch.

    Raises:
        CompressionCancelledError: the caller has cancelled the run.
        RocketError: see `compare_models`.
    """
    record = EvaluationRecord(settings=plan.settings, text_sha256=plan.how.text.sha256)
    known = work.evaluation(record)
    if known is not None:
        return known
    report = measure_artifact(run, plan, folders[run.config.evaluated_export], work.new_scratch(), monitor)
    work.save_evaluation(record, report)
    return report


def measure_artifact(run: Run, plan: EvaluationPlan, folder: Path, scratch: Path, monitor: Monitor) -> EvaluationReport:
    """Compare an artifact with the original.

    Args:
        run: the run.
        plan: the planned evaluation.
        folder: the artifact.
        scratch: an empty folder for the dense model's logits.
        monitor: notified of every batch.

    Raises:
        CompressionCancelledError: the caller has cancelled the run.
        RocketError: see `compare_models`.
    """
    kind = run.config.evaluated_export
    compared = compare_models(
        plan.dense,
        open_gguf(folder, plan.dense) if kind == "gguf" else open_model(folder),
        plan.how,
        scratch=scratch,
        on_step=lambda share, _what: monitor.step(share),
    )
    path, text = local_path_of(plan.settings.dataset), plan.how.text
    return EvaluationReport(
        export=kind,
        dataset=plan.settings.dataset if path is None else path.name,
        windows=text.count,
        sequence_length=text.length,
        stride=text.stride,
        tokens=compared.tokens,
        text_sha256=text.sha256,
        before=compared.before,
        after=compared.after,
        difference=compared.difference,
        answers=compared.answers,
    )


def _documents(
    run: Run, settings: EvaluationConfig, tokenizer: PreTrainedTokenizerBase, token: str | None
) -> Iterator[str]:
    """Return documents that the calibration does not read."""
    calibration = run.config.calibration
    if settings.dataset == BUILTIN_DATASET:
        # It has its own topics, and does not depend on the calibration data.
        return iter([held_out_text()])
    path, calibrated = local_path_of(settings.dataset), local_path_of(calibration.dataset)
    is_same = settings.dataset == calibration.dataset
    if path is not None and calibrated is not None:
        is_same = path.samefile(calibrated)
    if not is_same:
        reader = RowReader(tokenizer=tokenizer)
        if path is not None:
            return file_documents(path, reader)
        return documents(settings.dataset, seed=_SEED, token=token, reader=reader)
    reader = row_reader(calibration, tokenizer)
    rest = documents(calibration.dataset, seed=calibration.seed, token=token, reader=reader)
    # Skip the documents that calibration and healing read.
    healing = run.config.healing
    trained = 0 if healing is None else windows_to_draw(healing, run.sequence_length)
    if isinstance(run.inputs, EncoderText):
        run.inputs.windows(rest, calibration.samples)
    elif isinstance(run.inputs, DecoderText):
        count = max(calibration.samples, trained) if calibration.pack else trained
        if not calibration.pack:
            document_windows(rest, tokenizer, count=calibration.samples, length=run.sequence_length)
        if count:
            token_windows(rest, tokenizer, count=count, length=run.sequence_length)
    return rest


def measure_exports(run: Run, folders: Mapping[ExportKind, Path], work: WorkFolder, monitor: Monitor) -> SpeedReport:
    """Measure the original and the artifacts in turns, on the device and with the threads of the run.

    Args:
        run: the run.
        folders: the written artifacts.
        work: work folder for the result.
        monitor: notified of every measurement.

    Raises:
        CompressionCancelledError: the caller has cancelled the run.
        RocketError: see `measure_speed`.
    """
    known = work.speed()
    if known is not None:
        return known
    original = find_subject(run.source.folder, _ORIGINAL)
    artifacts = [find_subject(folder, kind) for kind, folder in folders.items()]
    report = measure_speed(
        [original, *artifacts],
        SpeedSettings(threads=torch.get_num_threads(), device=str(run.device)),
        on_step=lambda share, _what: monitor.step(share),
        check=monitor.check,
    )
    work.save_speed(report)
    return report


def measure(
    run: Run, plan: EvaluationPlan | None, folders: Mapping[ExportKind, Path], work: WorkFolder, monitor: Monitor
) -> tuple[EvaluationReport | None, SpeedReport | None]:
    """Return the quality and the speed of the artifacts, each None unless it is requested.

    Args:
        run: the run.
        plan: the planned evaluation; None if the quality is not measured.
        folders: the written artifacts.
        work: work folder for the results.
        monitor: notified of every step.
    """
    evaluation = speed = None
    if plan is not None:
        with monitor.stage("evaluating"):
            evaluation = evaluate_export(run, plan, folders, work, monitor)
    if run.config.benchmark:
        with monitor.stage("benchmarking"):
            speed = measure_exports(run, folders, work, monitor)
    return evaluation, speed
