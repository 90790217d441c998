"""The model card of an artifact."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import assert_never

from rocket_core.candidates import CODE_KINDS
from rocket_core.config import SYNTHETIC_DATASET
from rocket_core.engines import ExportKind
from rocket_core.inspection.files.model_files import read_start
from rocket_core.report.calibration import NO_DATASET, CalibrationReport
from rocket_core.report.quality import quality_rows
from rocket_core.report.run_commands import run_commands
from rocket_core.report.schema import CompressionReport
from rocket_core.report.speed import SPEED_COLUMNS, speed_rows
from rocket_core.sizes.budget import remaining_parameters
from rocket_core.sizes.target import ByBits, ByBytes, ByFormat, ByLoss, ByRatio

# How much of the original's card is read: the licence is in its first lines.
_CARD_BYTES = 2**20

_TAGS: Mapping[ExportKind, tuple[str, ...]] = {
    "gguf": ("gguf", "llama.cpp"),
    "compressed-tensors": ("compressed-tensors", "vllm"),
    "mlx": ("mlx",),
    "olive": ("olive", "onnxruntime-genai"),
}

_NOTES: Mapping[ExportKind, str] = {
    "rocket": """\
Without `import rocket_core.hf` loading stops with an error about the shape of a weight. `model.dequantize()` turns the
factors into plain dense layers.""",
    "dense": """\
Names, shapes and configuration are those of the original model, so any tool that reads the original reads this. The
weights are the products of the factors: this export is as large as the original and behaves like the `rocket` one.""",
    "gguf": """\
Each tensor has its own block type, chosen within the size of the file for the least loss. llama.cpp and programs that
are built on it read the file, which contains embeddings, head and tokenizer as well.""",
    "mlx": """\
Each layer has its own bits and size of groups, chosen within the size of the file for the least loss, embeddings and
head included. mlx-lm reads the folder as it is.""",
    "olive": """\
Quantized layers are stored as Olive stores them, each with its own bits and size of groups. The model builder of ONNX
Runtime GenAI makes an ONNX model of the folder, for the hardware that it is asked for. Without the options above it
quantizes embeddings and head as well, to 4 bits.""",
    "compressed-tensors": """\
Quantized layers are stored as formats of compressed-tensors that `config.json` names, with different bits
for different layers. vLLM computes from the codes, and rounds the inputs of layers in INT8 and FP8 as well;
`transformers` decompresses each layer when it is first used.""",
}


def model_card(report: CompressionReport, kind: ExportKind, source: Path) -> str:
    """Return the README.md of an artifact.

    Args:
        report: report of the compression.
        kind: kind of the artifact.
        source: folder of the original, whose card may name its licence.
    """
    totals, allocation, calibration = report.totals, report.allocation, report.calibration
    licence = _licence(source)
    export = next(item for item in report.exports if item.kind == kind)
    dense_layers = sum(layer.kind == "dense" for layer in report.layers)
    front = ["library_name: transformers", f"base_model: {report.model}"]
    # The Hub then lists it among the model's quantizations.
    front += ["base_model_relation: quantized"] if any(layer.kind in CODE_KINDS for layer in report.layers) else []
    front.append(f"tags: [{', '.join(['rocket', 'compressed', *_TAGS.get(kind, ())])}]")
    front += [f"license: {licence}"] if licence else []
    licence_text = f"That of the base model: {licence}." if licence else "That of the base model; see there."
    return f"""---
{chr(10).join(front)}
---
# {report.model}, {report.change_text}

Compressed from `{report.model}` (revision `{report.revision}`) by rocket-compress {report.rocket_version} with the
ROCKET method: each linear layer is stored as integer codes, sparse or factorized{_statistics(calibration)}, as one
knapsack over all layers decides. {_training(report)}

| | {totals.original_text} | this artifact |
|---|---|---|
| parameters of compressible layers | {totals.compressible_parameters:,} | {totals.kept_parameters:,} |
| parameters of the model | {totals.model_parameters:,} | {_model_parameters(report):,} |
| bytes of safetensors | {totals.dense_bytes:,} | {export.stored_bytes:,} |

- {_target(report)}, objective `{allocation.objective}`
- {dense_layers} of {len(report.layers)} layers left dense
- {_calibrated(calibration)}
- {export.loading_text}

Rank, sparsity and error of every layer stand in `report.json`, and are drawn in `report.html`.
{_quality(report)}{_speed(report)}
## Loading

{_commands(report, kind)}

{_NOTES[kind]}

## Limits

Compression loses quality; how much depends on the ratio and on how close the calibration data are to yours.
{_MADE_UP if calibration.dataset == SYNTHETIC_DATASET else ""}{_MEASURE}

## Licence

{licence_text}
"""


def _training(report: CompressionReport) -> str:
    healing = report.healing
    if healing is None:
        return "No training was involved."
    return f"""Then the numbers that
compressed layers store, norms and biases were trained towards the predictions of the original, in {healing.steps:,}
steps on {healing.tokens:,} tokens of `{healing.dataset}` (seed {healing.seed}). On held-out windows of that text the KL
divergence from them was {healing.divergence_before:.4f} nats per token and is {healing.divergence_after:.4f}. Errors
of layers in the report are those before."""


def _commands(report: CompressionReport, kind: ExportKind) -> str:
    commands = run_commands(report, kind, "path/to/this/folder")
    return "\n\n".join(f"{command.purpose}:\n\n```{command.language}\n{command.text}\n```" for command in commands)


def _quality(report: CompressionReport) -> str:
    evaluation = report.evaluation
    if evaluation is None:
        return ""
    rows = "\n".join(f"| {name} | {before} | {after} |" for name, before, after in quality_rows(evaluation))
    is_encoder = evaluation.difference.cosine_drift is not None
    read = f"{evaluation.windows} {'sentences' if is_encoder else 'windows'} of {evaluation.sequence_length} tokens"
    return f"""
## Quality

| | original | {evaluation.export} artifact |
|---|---|---|
{rows}

Measured on {read} of `{evaluation.dataset}`, {evaluation.tokens:,} tokens in all.
"""


def _speed(report: CompressionReport) -> str:
    if report.speed is None:
        return ""
    rows = "\n".join(f"| {' | '.join(row)} |" for row in speed_rows(report.speed))
    return f"""
## Speed

| {" | ".join(SPEED_COLUMNS)} |
|{"---|" * len(SPEED_COLUMNS)}
{rows}

Measured in turns: {report.speed.conditions}.
"""


def _target(report: CompressionReport) -> str:
    match report.settings.target:
        case ByRatio(ratio=ratio):
            return f"target ratio {ratio}"
        case ByBytes(target_bytes=size, fit=fit):
            memory = "" if fit is None else f", for {fit.memory_bytes:,} bytes of memory with {fit.tokens_text}"
            return f"target size {size:,} bytes{memory}"
        case ByBits() as target:
            return f"target {target.text} of the layers"
        case ByLoss() as target:
            return f"target {target.text}, as small as possible"
        case ByFormat() as target:
            return f"all layers in {target.text}"
        case None:
            raise AssertionError("a report is of a compression, which has a target")
        case unknown:
            assert_never(unknown)


_MADE_UP = "These were made up, which costs more of it than real ones would.\n"
_MEASURE = "Measure it on data of your own before you rely on it. Limits and biases of the base model remain."


def _statistics(calibration: CalibrationReport) -> str:
    return "" if calibration.dataset == NO_DATASET else " by calibration statistics"


def _calibrated(calibration: CalibrationReport) -> str:
    if calibration.dataset == NO_DATASET:
        return "not calibrated: every weight is rounded by itself"
    return f"calibrated on {_samples(calibration)} (seed {calibration.seed})"


def _samples(calibration: CalibrationReport) -> str:
    count, length, dataset = calibration.samples, calibration.sequence_length, calibration.dataset
    if calibration.kind == "images":
        return f"{count} images of `{dataset}`"
    if calibration.kind in ("text and images", "text and audio"):
        return f"{count} texts with {calibration.kind.rpartition(' ')[2]} of `{dataset}`"
    if calibration.kind == "audio":
        return f"{count} windows of audio of `{dataset}`, with {length} tokens of built-in text each for the decoder"
    return f"{count} windows of {length} tokens of `{dataset}`"


def _model_parameters(report: CompressionReport) -> int:
    totals = report.totals
    return remaining_parameters(totals.model_parameters, totals.compressible_parameters, totals.kept_parameters)


def _licence(source: Path) -> str | None:
    if not (source / "README.md").is_file():
        return None
    card = read_start(source, "README.md", _CARD_BYTES).decode("utf-8", errors="replace")
    match = re.search(r"^license:\s*(\S+)\s*$", card, re.MULTILINE)
    return match.group(1) if match else None
