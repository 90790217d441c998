"""Summary of a compression in a few numbers: size, quality, memory and speed, time."""

from rocket_core.report.expectation import expectation
from rocket_core.report.figures import ERROR_NAMES
from rocket_core.report.formatting import bytes_text, duration_text, percent_text
from rocket_core.report.quality import EvaluationReport, quality_rows
from rocket_core.report.schema import CompressionReport
from rocket_core.report.speed import ModelSpeed, rate_text
from rocket_core.schema import FrozenModel

_KINDS_OF_CODES = {"dense", "quantized", "entropy_coded"}
# By how much blocks of 64 codes take more than their entropy: 0.9 to 1.0 bits for normal distributions of any width,
# 1.4 for those of Laplace, and 1.0 in SmolLM2-135M.
_MORE_BITS_IN_BLOCKS = 1.1


class Headline(FrozenModel):
    """One of the numbers."""

    name: str
    """what is measured."""
    value: str
    """the value after the compression."""
    detail: str
    """the value before, and how it was determined."""


def headlines(report: CompressionReport) -> tuple[Headline, ...]:
    """Return the size and quality of a compression, memory and speed if they were measured, and its time."""
    return _size(report), quality_headline(report), *_speed(report), _time(report)


def _size(report: CompressionReport) -> Headline:
    totals = report.totals
    saved = 1 - totals.stored_bytes / totals.dense_bytes if totals.dense_bytes else 0.0
    if [export.kind for export in report.exports] == ["dense"]:
        detail = f"as large as the original; the weights are those of {report.change_text}"
    else:
        change = f"{percent_text(saved)} less" if saved >= 0 else f"{percent_text(-saved)} more"
        bits = "" if totals.original_bits is None else f" ({totals.original_text})"
        detail = f"was {bytes_text(totals.dense_bytes)}{bits}, {change}; {report.change_text}"
    memory = _memory_of_codes(report)
    if memory is not None:
        detail += f"; about {bytes_text(memory)} in memory on a CPU"
    return Headline(name="Size", value=bytes_text(totals.stored_bytes), detail=detail)


def _memory_of_codes(report: CompressionReport) -> int | None:
    """Return about the bytes of weights that transformers holds; None unless all layers are dense or codes."""
    stored = next((export.stored_bytes for export in report.exports if export.kind == "rocket"), None)
    if stored is None or any(layer.kind not in _KINDS_OF_CODES for layer in report.layers):
        return None
    coded = sum(layer.d_in * layer.d_out for layer in report.layers if layer.kind == "entropy_coded")
    return stored + round(_MORE_BITS_IN_BLOCKS * coded / 8)


def quality_headline(report: CompressionReport) -> Headline:
    """Return the quality of a compression, measured or predicted."""
    healing, error, text = report.healing, report.allocation.total_error, report.calibration.text
    if report.evaluation is not None:
        return measured_quality(report.evaluation)
    if healing is not None:
        return Headline(
            name="Quality",
            value=f"{healing.divergence_before:.3g} → {healing.divergence_after:.3g}",
            detail="KL divergence from the original, nats per token, before and after healing, measured on "
            f"{healing.held_out_windows} held-out windows of {healing.dataset}",
        )
    if text is not None and report.allocation.objective == "fisher":
        expected = expectation(error, text, sequential=report.settings.sequential)
        return Headline(name="Quality", value=expected.value, detail=expected.explanation)
    return Headline(
        name="Quality",
        value=f"{error:.3g}",
        detail=f"predicted, not measured: {ERROR_NAMES[report.allocation.objective]}. Ask for an evaluation to "
        "measure it",
    )


def measured_quality(evaluation: EvaluationReport) -> Headline:
    """Return the quality of a compression as it was measured."""
    name, before, after = quality_rows(evaluation)[0]
    value = f"{before} → {after}" if before else after
    return Headline(name="Quality", value=value, detail=f"{name}, {evaluation.tokens:,} tokens of {evaluation.dataset}")


def export_rows(report: CompressionReport) -> list[tuple[str, str, str]]:
    """Return memory and speed of the original and of the export that a compression was made for, if measured.

    Returns:
        Rows of what was measured, value before and value after; a value before is empty if it is unknown.
    """
    measured = _measured_export(report)
    if measured is None:
        return []
    original, export = measured
    held = [
        ("memory of the loaded weights", original.weights_bytes, export.weights_bytes),
        ("memory of the process", original.memory_bytes, export.memory_bytes),
    ]
    memory = [
        (name, "" if before is None else bytes_text(before), bytes_text(after))
        for name, before, after in held
        if after is not None
    ]
    rates = [
        ("tokens generated per second", original.generation_rate, export.generation_rate, export.generation_ratio),
        ("tokens of the prompt read per second", original.prompt_rate, export.prompt_rate, export.prompt_ratio),
    ]
    return memory + [
        (name, rate_text(before), f"{rate_text(after)} ({ratio:.2f}x)") for name, before, after, ratio in rates
    ]


def _measured_export(report: CompressionReport) -> tuple[ModelSpeed, ModelSpeed] | None:
    """Return the speed of the original and of the export that a compression was made for."""
    models = () if report.speed is None else report.speed.models
    made_for = report.settings.reader.exports[0]
    export = next((model for model in models if model.name == made_for), None)
    return None if export is None else (models[0], export)


def _speed(report: CompressionReport) -> list[Headline]:
    measured = _measured_export(report)
    if measured is None:
        return []
    original, export = measured
    found = [
        Headline(
            name="Speed",
            value=f"{export.generation_ratio:.2f}x",
            detail=f"as fast as the original: {export.generation_rate:,.3g} tokens per second generated",
        )
    ]
    memory = _memory(original, export)
    return found if memory is None else [memory, *found]


def _memory(original: ModelSpeed, export: ModelSpeed) -> Headline | None:
    held = ""
    if export.memory_bytes is not None and original.memory_bytes is not None:
        held = f"{bytes_text(export.memory_bytes)}, was {bytes_text(original.memory_bytes)}"
    if export.weights_bytes is not None and original.weights_bytes is not None:
        process = f"; the process, with cache and buffers, holds {held}" if held else ""
        detail = f"of the loaded weights, was {bytes_text(original.weights_bytes)}{process}"
        return Headline(name="Memory", value=bytes_text(export.weights_bytes), detail=detail)
    if not held:
        return None
    value, _, before = held.partition(", ")
    return Headline(name="Memory", value=value, detail=f"{before}: weights, cache and buffers of the process")


def _time(report: CompressionReport) -> Headline:
    detail = f"with at most {bytes_text(report.peak_memory_bytes)} of memory"
    if report.energy_text is not None:
        detail += f" and {report.energy_text}"
    return Headline(name="Time", value=duration_text(report.seconds), detail=detail)
