"""Checks of a request against its model's files: whether the model can be compressed, and what that would take.

Runs in a separate process, as the files are untrusted (`app.services.judge_process`). Other faults are found in the
job's `preflight` stage, under the same codes. Messages name a local model as the client did, never by its folder on
this machine.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, assert_never

from app.services.questions import Figures, HubQuestion, Judged, Operations, Question
from app.shared.errors import OverQuotaError
from app.shared.requests import LOCAL, JobRequest
from rocket_core import budget
from rocket_core.coverage import Coverage
from rocket_core.errors import ModelNotFoundError
from rocket_core.inspection.batch_size import tokens_per_batch
from rocket_core.inspection.benchmark_footprint import benchmark_footprint
from rocket_core.inspection.duration import total_operations
from rocket_core.inspection.evaluation_footprint import evaluation_footprint
from rocket_core.inspection.feasibility import check_feasible, reach_of_model
from rocket_core.inspection.footprint import (
    ModelShape,
    ResourceEstimate,
    Workload,
    describe_model,
    estimate_footprint,
    factored_export_bytes,
    input_bytes,
    positions,
    sample_positions,
)
from rocket_core.inspection.header_coverage import coverage_of_headers
from rocket_core.inspection.healing_footprint import HealingSizes, batch_windows, healing_footprint, vocabulary
from rocket_core.inspection.hub import find_repository
from rocket_core.inspection.media_lines import check_media
from rocket_core.inspection.model_files import CONFIG_NAME, check_adapter, read_start, vet_folder
from rocket_core.inspection.preconditions import (
    MAX_CONFIG_BYTES,
    check_calibration,
    check_config,
    check_heals,
    check_tokenizer,
    check_vision,
    input_kind,
    parse_config,
    window_length,
)
from rocket_core.inspection.prompts import check_prompts
from rocket_core.inspection.safetensors_headers import (
    WeightSummary,
    local_weight_files,
    read_header,
    sum_summaries,
    summarize,
)
from rocket_core.inspection.tower_footprint import tower_workload
from rocket_core.target import ByBits, ByBytes, ByFormat, ByRatio, Target

# Names and shapes of a layer's parts in the header of a file: more than any model has.
_LAYER_HEADER_BYTES = 1024
# Lines of calibration data that are judged with the request; the run reads all.
_MOST_LINES = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inspected:
    """What is known of a model that may be compressed.

    Attributes:
        commit: commit of its repository; None for a local model.
        config: the content of its config.json.
        weights: summary of its headers; None where the Hub would take too long to send them.
        positions: positions of a calibration sample: tokens, or what images and audio become in the model.
        window_length: tokens per window of text.
        evaluation_length: tokens per window of an evaluation; None if none is requested.
    """

    commit: str | None
    config: Mapping[str, Any]
    weights: WeightSummary | None
    positions: int
    window_length: int
    evaluation_length: int | None


def judge(question: Question) -> Judged:
    """Refuse a request that no worker could carry out; return what is known of it, with an estimate if requested.

    Raises:
        HubUnavailableError: the Hub is unreachable; the same request may be admitted later.
        OverQuotaError: the model is too large for the tenant.
        RocketError: the request is invalid; the code is that which the job would have failed with.
    """
    model = _see_local_model(question) if question.hub is None else _see_hub_model(question, question.hub)
    if model.weights is None:
        return Judged()
    config = question.request.compression_config(dataset="builtin")
    selected = coverage_of_headers(model.config, model.weights, config)
    figures = _estimate(question.request, model, model.weights, selected) if question.is_estimate else None
    return Judged(warnings=() if selected.warning is None else (selected.warning,), figures=figures)


def check_model_size(most: int | None, weights: WeightSummary | None) -> None:
    """Refuse a model that is too large for a tenant, or of unknown size where size is limited.

    Args:
        most: upper bound on the bytes of weights; None for no limit.
        weights: summary of the headers; None if they could not be read in time.

    Raises:
        OverQuotaError: the model is too large, or of unknown size.
    """
    if most is None:
        return
    if weights is None:
        raise OverQuotaError(
            f"models may have at most {most} bytes, and the size of this one could not be determined in time",
            param="model_id",
        )
    size = sum(weights.dtype_bytes.values())
    if size > most:
        raise OverQuotaError(f"the model has {size} bytes of weights; at most {most} are allowed", param="model_id")


def _see_local_model(question: Question) -> _Inspected:
    assert question.folder is not None
    folder, name = Path(question.folder), question.request.model_id
    try:
        vet_folder(folder, name)
        config = parse_config(read_start(folder, CONFIG_NAME, MAX_CONFIG_BYTES + 1), name)
        _refuse(config, question, name)
        files = local_weight_files(folder, name)
        weights = sum_summaries((summarize(read_header(file, f"{name}/{file.name}")) for file in files), name)
    except OSError as error:
        raise ModelNotFoundError(
            f"a file of {name} cannot be read ({type(error).__name__}); ask the operator of this server"
        ) from error
    check_model_size(question.model_bytes, weights)
    inspected = _inspect(None, config, weights, question.request, name)
    check_tokenizer([file.name for file in folder.iterdir()], input_kind(config), name)
    return inspected


def _see_hub_model(question: Question, hub: HubQuestion) -> _Inspected:
    request = question.request
    repository = find_repository(request.model_id, request.revision, token=hub.token, seconds=hub.seconds)
    name = "the model repository"
    check_adapter(repository.files, name)
    config = parse_config(repository.read_config(), name)
    _refuse(config, question, name)
    weights = repository.read_weights()
    check_model_size(question.model_bytes, weights)
    inspected = _inspect(repository.commit, config, weights, request, name)
    check_tokenizer(repository.files, input_kind(config), name)
    return inspected


def _refuse(config: Mapping[str, Any], question: Question, name: str) -> None:
    check_config(config, name)
    if question.request.options.heal_tokens is not None:
        check_heals(config, name)
    asked = question.request.evaluate
    if asked is not None:
        check_prompts(config, len(asked.prompts), asked.answer_tokens, name)
    if question.lacks_data:
        return
    check_calibration(input_kind(config), question.dataset, question.request.calibration.sequence_length, name)
    dataset = question.request.calibration.dataset
    is_local = dataset.startswith(LOCAL)
    compression = question.request.compression_config(dataset=question.dataset if is_local else "builtin")
    check_vision(config, compression, name)
    check_media(config, compression, name, name=dataset, most_lines=_MOST_LINES)


def _inspect(
    commit: str | None, config: Mapping[str, Any], weights: WeightSummary | None, request: JobRequest, name: str
) -> _Inspected:
    if weights is not None:
        check_feasible(config, weights, request.compression_config(dataset="builtin"), name)
    longest, evaluate = positions(config), request.evaluate
    length = window_length(longest, request.calibration.sequence_length)
    return _Inspected(
        commit=commit,
        config=config,
        weights=weights,
        positions=sample_positions(config, input_kind(config), length),
        window_length=length,
        evaluation_length=None if evaluate is None else window_length(longest, evaluate.sequence_length),
    )


def _estimate(request: JobRequest, inspected: _Inspected, weights: WeightSummary, selected: Coverage) -> Figures:
    config = request.compression_config(dataset="builtin")
    model = describe_model(
        inspected.config, weights, ignore=config.ignore, dtype=config.dtype, vision=config.includes_vision
    )
    work = Workload(
        config=config,
        windows=config.calibration.samples,
        sequence_length=inspected.positions,
        batch_tokens=tokens_per_batch(config.device),
        **_sample_sizes(inspected, vision=config.includes_vision),
    )
    footprint = _with_measurements(estimate_footprint(model, work), model, request, inspected)
    only = config.target if isinstance(config.target, ByFormat) else None
    reach = reach_of_model(
        model, quantizes=config.quantizes, only=only, tables=config.decides_tables, codes=config.code_choices
    )
    # Without a target, the bounds are those of the dense model.
    ratio = 0.0 if config.target is None else reach.check(config.target)
    return Figures(
        commit=inspected.commit,
        parameters=model.parameters,
        stored_bytes=model.stored_bytes,
        compressible_parameters=model.compressible_parameters,
        # Codes keep every parameter in fewer bits.
        kept_parameters=budget.parameter_budget(
            model.compressible_parameters, 0.0 if config.quantizes or only else ratio
        ),
        factored_bytes=_most_bytes(model, ratio, config.target),
        ratio=ratio,
        nearest_ratio=min(ratio, reach.ratio),
        calibration_tokens=work.tokens,
        memory_bytes=footprint.memory_bytes,
        # Its files are put together from the pieces in which they arrived.
        disk_bytes=footprint.disk_bytes + (model.stored_bytes if request.uploaded_model is not None else 0),
        selected_bytes=selected.selected_bytes,
        operations=_operations(request, model, work),
    )


def _sample_sizes(inspected: _Inspected, *, vision: bool) -> dict[str, int]:
    if vision:
        return tower_workload(inspected.config, inspected.window_length)
    return {"input_bytes": input_bytes(inspected.config, input_kind(inspected.config))}


def _operations(request: JobRequest, model: ModelShape, work: Workload) -> Operations | None:
    """Return the operations of a job that only compresses; None if they are not known."""
    if request.benchmark or request.evaluate is not None or request.options.heal_tokens is not None:
        return None
    counted = total_operations(model, work)
    return None if counted is None else Operations(**asdict(counted))


def _most_bytes(model: ModelShape, ratio: float, target: Target | None) -> int:
    largest = factored_export_bytes(model, ratio)
    match target:
        case ByBytes(target_bytes=size):
            return min(largest, size)
        case ByBits(bits=bits):
            dense = budget.dense_bytes(model.compressible_parameters, 1, model.itemsize)
            layers = budget.bits_budget(model.compressible_parameters, bits) + _LAYER_HEADER_BYTES * len(model.shapes)
            return min(largest, model.stored_bytes - dense + layers)
        case ByRatio() | ByFormat() | None:
            return largest
        case _:
            assert_never(target)


def _with_measurements(
    footprint: ResourceEstimate, model: ModelShape, request: JobRequest, inspected: _Inspected
) -> ResourceEstimate:
    if request.benchmark:
        benchmark = benchmark_footprint(model, len(request.options.export))
        footprint = replace(footprint, memory_bytes=max(footprint.memory_bytes, benchmark.memory_bytes))
    if request.options.heal_tokens is not None:
        footprint = _with_healing(footprint, model, inspected)
    if request.evaluate is None or inspected.evaluation_length is None:
        return footprint
    asked = request.evaluate
    tokens = asked.samples * min(asked.stride or sys.maxsize, inspected.evaluation_length)
    tokens += len(asked.prompts) * asked.answer_tokens
    evaluation = evaluation_footprint(model, tokens=tokens, vocabulary=vocabulary(inspected.config, model))
    return ResourceEstimate(
        memory_bytes=max(footprint.memory_bytes, evaluation.memory_bytes),
        disk_bytes=footprint.disk_bytes + evaluation.disk_bytes,
    )


def _with_healing(footprint: ResourceEstimate, model: ModelShape, inspected: _Inspected) -> ResourceEstimate:
    sizes = HealingSizes.of(model, vocabulary(inspected.config, model))
    call_tokens = inspected.window_length * batch_windows(sizes.vocabulary, inspected.window_length)
    healing = healing_footprint(sizes, call_tokens=call_tokens)
    return ResourceEstimate(
        memory_bytes=max(footprint.memory_bytes, healing.memory_bytes),
        disk_bytes=footprint.disk_bytes + healing.disk_bytes,
    )
