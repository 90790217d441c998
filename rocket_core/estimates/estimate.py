"""Estimated sizes and needs of a run, from config.json and the safetensors headers. Loads no torch."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, assert_never

from rocket_core.config import CompressionConfig
from rocket_core.estimates.batch_size import tokens_per_batch
from rocket_core.estimates.coverage import Coverage, coverage_of_headers
from rocket_core.estimates.duration import total_operations, why_uncounted
from rocket_core.estimates.evaluation_duration import EvaluationSizes
from rocket_core.estimates.footprint import (
    ModelShape,
    ResourceEstimate,
    Workload,
    benchmark_footprint,
    describe_model,
    estimate_footprint,
    evaluation_footprint,
    rocket_export_bytes,
)
from rocket_core.estimates.healing import HealingSizes, HealingWork, batch_windows, healing_footprint, vocabulary
from rocket_core.estimates.operations import Operations
from rocket_core.estimates.tower_footprint import tower_workload
from rocket_core.inspection.checks.context_fit import fitted
from rocket_core.inspection.checks.model_reach import reach_of_headers
from rocket_core.inspection.checks.preconditions import CALIBRATION_WINDOW_LENGTH, window_length
from rocket_core.inspection.headers.model_fields import input_bytes, input_kind, positions, sample_positions
from rocket_core.inspection.headers.weight_summary import WeightSummary, item_bytes
from rocket_core.sizes import budget
from rocket_core.sizes.memory_fit import FittedMemory
from rocket_core.sizes.target import ByBits, ByBytes, ByFormat, ByLoss, ByRatio, Target
from rocket_core.system.machine_speed import has_accelerator, measure_speed

# Names and shapes of a layer's parts in the header of a file: more than any model has.
_LAYER_HEADER_BYTES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEstimate:
    """What a run is expected to make and to need.

    Attributes:
        parameters: parameters of the whole model.
        stored_bytes: bytes of its weights.
        compressible_parameters: parameters of the layers that can be compressed.
        kept_parameters: upper bound on the parameters kept.
        factored_bytes: upper bound on the weight bytes of the compressed artifact.
        ratio: requested ratio, or that of the compressible layers' bytes for a requested size; 0 without a target.
        nearest_ratio: the same, or the highest ratio that is certainly reachable if that is less.
        calibration_tokens: upper bound on the tokens read.
        memory_bytes: peak memory of the device that computes.
        disk_bytes: disk space for checkpoints and artifacts.
        coverage: what of the model is selected.
        operations: what its time depends on; None if that is not known.
        why_no_time: why it is not; None if it is.
        fit: how the memory is divided, where a fit is asked for.
    """

    parameters: int
    stored_bytes: int
    compressible_parameters: int
    kept_parameters: int
    factored_bytes: int
    ratio: float
    nearest_ratio: float
    calibration_tokens: int
    memory_bytes: int
    disk_bytes: int
    coverage: Coverage
    operations: Operations | None
    why_no_time: str | None
    fit: FittedMemory | None = None


def estimate_run(
    settings: Mapping[str, Any],
    weights: WeightSummary,
    config: CompressionConfig,
    *,
    dense_file_bytes: int | None = None,
) -> RunEstimate:
    """Estimate what a run makes and needs.

    Args:
        settings: the content of config.json, checked by `rocket_core.hub.requests`.
        weights: summary of the safetensors headers, checked as well.
        config: the compression.
        dense_file_bytes: see `model_reach.reach_of_headers`.

    Raises:
        InvalidConfigError: a length is more than the model has positions for.
        InfeasibleBudgetError: no choice of candidates can reach the target.
    """
    config = fitted(config, settings, item_bytes(weights, config.dtype, "the model"), "the model")
    model = describe_model(settings, weights, ignore=config.ignore, dtype=config.dtype, vision=config.includes_vision)
    window = window_length(positions(settings), config.calibration.sequence_length, CALIBRATION_WINDOW_LENGTH)
    work = Workload(
        config=config,
        windows=config.calibration.samples if config.calibrates else 0,
        sequence_length=sample_positions(settings, input_kind(settings), window),
        batch_tokens=tokens_per_batch(config.device),
        **_sample_sizes(settings, window, vision=config.includes_vision),
    )
    footprint = _with_measurements(estimate_footprint(model, work), model, config, settings)
    reach = reach_of_headers(settings, weights, config, dense_file_bytes=dense_file_bytes)
    # Without a target, the bounds are those of the dense model.
    ratio = 0.0 if config.target is None else reach.check(config.target)
    unknown = _why_no_time(config)
    healing = HealingWork.expected(config, model, settings)
    evaluation = EvaluationSizes.expected(config, model, settings)
    operations = None if unknown else total_operations(model, work, healing=healing, evaluation=evaluation)
    return RunEstimate(
        parameters=model.parameters,
        stored_bytes=weights.stored_bytes,
        compressible_parameters=model.compressible_parameters,
        # Codes keep every parameter in fewer bits.
        kept_parameters=budget.parameter_budget(
            model.compressible_parameters, 0.0 if config.quantizes or config.stores_one_format else ratio
        ),
        factored_bytes=_most_bytes(model, ratio, config.target),
        ratio=ratio,
        nearest_ratio=min(ratio, reach.ratio),
        calibration_tokens=work.tokens,
        memory_bytes=footprint.memory_bytes,
        disk_bytes=footprint.disk_bytes,
        coverage=coverage_of_headers(settings, weights, config),
        operations=operations,
        why_no_time=unknown,
        fit=config.fit if isinstance(config.fit, FittedMemory) else None,
    )


def expected_seconds(operations: Operations | None) -> float | None:
    """Return the seconds of a run on this machine; None if they are not known, as where `why_not_timed_here` says so.

    The machine's speed is measured once in a process, in half a second.
    """
    if operations is None or why_not_timed_here() is not None:
        return None
    return float(f"{operations.duration(measure_speed()):.2g}")


def why_not_timed_here() -> str | None:
    """Return why the time of no run is known on this machine; None if it is."""
    if has_accelerator():
        return "this machine has a GPU, whose speed is not measured beforehand"
    if find_spec("numpy") is None:
        return "numpy is not installed here, with which the speed of this machine is measured"
    return None


def _sample_sizes(settings: Mapping[str, Any], window: int, *, vision: bool) -> dict[str, int]:
    if vision:
        return tower_workload(settings, window)
    return {"input_bytes": input_bytes(settings, input_kind(settings))}


def _why_no_time(config: CompressionConfig) -> str | None:
    """Return why the time of a run is not known; None if it is."""
    more = [
        ("an evaluation on tasks", config.evaluate is not None and bool(config.evaluate.tasks)),
        ("a measurement of speed", config.benchmark),
    ]
    asked = next((name for name, is_asked in more if is_asked), None)
    if asked is not None:
        return f"the time of {asked} is not counted; without it, that of the compression is"
    return why_uncounted(config)


def _most_bytes(model: ModelShape, ratio: float, target: Target | None) -> int:
    largest = rocket_export_bytes(model, ratio)
    match target:
        case ByBytes(target_bytes=size):
            return min(rocket_export_bytes(model, 0.0), size)
        case ByBits(bits=bits):
            dense = budget.dense_bytes(model.compressible_parameters, 1, model.itemsize)
            layers = budget.bits_budget(model.compressible_parameters, bits) + _LAYER_HEADER_BYTES * len(model.shapes)
            return min(largest, model.stored_bytes - dense + layers)
        case ByRatio() | ByFormat() | ByLoss() | None:
            return largest
        case _:
            assert_never(target)


def _with_measurements(
    footprint: ResourceEstimate, model: ModelShape, config: CompressionConfig, settings: Mapping[str, Any]
) -> ResourceEstimate:
    longest, asked = positions(settings), config.evaluate
    if config.benchmark:
        footprint = footprint.before(benchmark_footprint(model, len(config.export)))
    if config.heal_tokens is not None:
        sizes = HealingSizes.of(model, vocabulary(settings, model))
        window = window_length(longest, config.calibration.sequence_length)
        call_tokens = window * batch_windows(sizes.vocabulary, window)
        footprint = footprint.before(healing_footprint(sizes, call_tokens=call_tokens))
    if asked is not None:
        length = window_length(longest, asked.sequence_length)
        tokens = asked.samples * min(asked.stride or sys.maxsize, length) + len(asked.prompts) * asked.answer_tokens
        evaluation = evaluation_footprint(model, tokens=tokens, vocabulary=vocabulary(settings, model))
        footprint = footprint.before(evaluation)
    return footprint
