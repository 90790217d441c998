"""Output of commands for people, in particular the report of a compression as a table."""

import json
import shlex
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from rocket_cli.progress_view import print_line
from rocket_core.config import BUILTIN_DATASET, SYNTHETIC_DATASET, CalibrationKind
from rocket_core.report.answers import ComparedAnswer, Piece, pieces_after, pieces_before
from rocket_core.report.calibration import NO_DATASET
from rocket_core.report.formatting import bytes_text, count_text, duration_text, percent_text
from rocket_core.report.headlines import headlines, quality_headline
from rocket_core.report.healing import HealingReport
from rocket_core.report.quality import EvaluationReport, quality_rows
from rocket_core.report.run_commands import RunCommand, run_commands
from rocket_core.report.schema import CompressionReport, ExportReport, LayerReport
from rocket_core.report.speed import SPEED_COLUMNS, SpeedReport, speed_rows

if TYPE_CHECKING:
    from rocket_core.evaluation import EvaluationResult

# Wider than any table here: a narrow terminal wraps whole lines, whereas a table that is fitted to it loses columns.
_UNBOUNDED_WIDTH = 1000

# Layers with a row if not all have one; of fewer layers, all have.
_EXTREMES = 5
_MOST_ROWS = 20

_BITS = "bits per\nweight"
_COLUMNS = ("kind", "rank", "nnz", "sparsity", "kept", "ratio", _BITS, "output\nerror", "weight\nerror")

# Name of the samples of each kind, and the beginning of "the text has no more".
_SAMPLES: dict[CalibrationKind, tuple[str, str]] = {
    "text": ("windows", "the text has"),
    "images": ("images", "the folder has"),
    "audio": ("windows of audio", "the folder has"),
    "text and images": ("texts with images", "the file has"),
    "text and audio": ("texts with audio", "the file has"),
}

# Before the first token that differs: visible without colours as well.
_PARTING = "▶"
_STYLES = ("", "yellow", "bold red")


def print_report(
    report: CompressionReport,
    output: Path,
    *,
    all_layers: bool = True,
    fetched_by: str | None = None,
    exported_by: str | None = None,
) -> None:
    """Write the report to stdout: rows for layers, totals, folders, how to load them, and how to make a dense export.

    Args:
        report: report of a finished compression.
        output: the folder that contains the exports, as the user typed it.
        all_layers: whether each layer has a row; otherwise, if there are many, only those with the fewest and the most
            bits per weight.
        fetched_by: the command that downloads the exports to it; None if they are there already.
        exported_by: the command that makes a dense export; None takes the one for exports that are there.
    """
    console = wide_console()
    size = headlines(report)[0]
    console.print(f"{size.name}: {size.value}; {size.detail}\n")
    _print_layers(console, report, all_layers=all_layers)
    console.print()
    _print_lines(console, _totals(report))
    console.print()
    _print_lines(console, _size_tables(report, output))
    _print_loadings(console, report.exports)
    if report.healing is not None:
        console.print()
        _print_lines(console, _healing_lines(report.healing))
    if report.evaluation is not None:
        console.print()
        print_evaluation_report(report.evaluation)
    if report.rounds:
        console.print("\nSizes that were tried:")
    for tried in report.rounds:
        console.print(f"  {tried.text}")
    if report.verdict is not None:
        console.print(f"\nVerdict: {report.verdict.text}", style="" if report.verdict.is_accepted else "bold red")
    if report.speed is not None:
        console.print()
        print_speed(report.speed)
    console.print()
    if fetched_by is not None:
        console.print(f"To download it:\n\n    {fetched_by}\n")
    made_for = report.settings.reader.exports
    export = next((export for export in report.exports if export.kind in made_for), report.exports[0])
    _print_lines(console, _command_lines(run_commands(report, export.kind, str(output / export.folder))))
    folders = {export.kind: export.folder for export in report.exports}
    if "rocket" in folders and "dense" not in folders:
        local = shlex.join(["rocket", "export", str(output / folders["rocket"]), "stock", "--to", "dense"])
        console.print("\nTo make a copy that other tools read, as large as the original:\n")
        console.print(f"    {exported_by or local}")


def _print_layers(console: Console, report: CompressionReport, *, all_layers: bool) -> None:
    prefix = common_prefix(layer.name for layer in report.layers)
    shown = report.layers if all_layers or len(report.layers) <= _MOST_ROWS else _extremes(report.layers)
    console.print(_layer_table(report, shown, prefix))
    if len(shown) < len(report.layers):
        ends = f"The {_EXTREMES} layers with the fewest bits per weight, and the {_EXTREMES} with the most"
        console.print(f"{ends}; --table shows all {len(report.layers)}", style="dim")
    if prefix:
        console.print(f"All layer names begin with {prefix}", style="dim")
    for reason, count in Counter(report.skipped.values()).items():
        console.print(f"Not compressed: {count} {_plural('layer', count)} ({reason})", style="dim")
    unseen = [name for name, tokens in report.experts.items() if tokens == 0]
    if unseen:
        console.print(
            f"No calibration token was routed to {len(unseen)} of {len(report.experts)} experts, first {unseen[0]}; "
            "they were compressed for an average token of their block. More --samples reach more experts.",
            style="dim",
        )


def _print_loadings(console: Console, exports: Sequence[ExportReport]) -> None:
    for export in exports:
        faulty = export.loading is not None and export.loading.anomaly is not None
        console.print(f"{export.kind} export: {export.loading_text}", style="bold red" if faulty else "")


def print_export(export: ExportReport, output: Path, report: CompressionReport | None) -> None:
    """Write to stdout what an export made later is, and how to run it.

    Args:
        export: the export.
        output: its folder, as the user typed it.
        report: report of the compression; None if the artifact had none.
    """
    console = wide_console()
    original = "" if report is None else f"; the original has {bytes_text(report.totals.dense_bytes)}"
    console.print(f"{export.kind}: {bytes_text(export.stored_bytes)} in {output}{original}")
    if report is not None:
        console.print()
        _print_lines(console, _command_lines(run_commands(report, export.kind, str(output))))


def wide_console() -> Console:
    """Return a console that writes to stdout without wrapping lines or interpreting markup."""
    return Console(width=_UNBOUNDED_WIDTH, markup=False, highlight=False, emoji=False)


def memory_table(parts: Iterable[tuple[str, int]]) -> Table:
    """Return a table that shows how a memory is divided."""
    rows = ((name, bytes_text(size)) for name, size in parts)
    return text_table(("memory when it runs", ""), rows, right=("",))


def text_table(
    columns: Sequence[str], rows: Iterable[Iterable[str]], *, right: Container[str] = (), is_wide: bool = False
) -> Table:
    """Return a table without lines.

    Args:
        columns: headings.
        rows: the text of the cells.
        right: columns that are aligned to the right.
        is_wide: whether columns are two spaces apart instead of one, and long cells have several lines.
    """
    table = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=not is_wide)
    for column in columns:
        table.add_column(Text(column), justify="right" if column in right else "left", no_wrap=not is_wide)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def print_names(names: Sequence[str], kind: str, *, as_json: bool) -> None:
    """Write names to stdout, one per line, or as JSON in the server's format."""
    if as_json:
        typer.echo(json.dumps({"data": [{"id": name} for name in names]}, indent=2))
    elif names:
        typer.echo("\n".join(names))
    else:
        print_line(f"the server has no local {kind}")


def common_prefix(names: Iterable[str]) -> str:
    """Return the longest common prefix of names that ends with a dot; it is never a whole name."""
    parents = [name.split(".")[:-1] for name in names]
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False))]
    return "".join(f"{part}." for part in shared)


def _extremes(layers: Sequence[LayerReport]) -> list[LayerReport]:
    """Return the layers with the fewest and the most bits per weight, in the order of their bits."""
    # Old reports have no bits.
    ordered = sorted(layers, key=lambda layer: (layer.bits_per_weight or 0, -layer.compression_ratio))
    return [*ordered[:_EXTREMES], *ordered[-_EXTREMES:]]


def _layer_table(report: CompressionReport, layers: Sequence[LayerReport], prefix: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True, show_footer=True)
    table.add_column("layer", footer="total", overflow="fold")
    totals = report.totals
    footers = {
        "kept": count_text(totals.kept_parameters),
        "ratio": percent_text(totals.achieved_ratio),
        _BITS: f"{report.bits_per_weight:.2f}",
    }
    for column in _COLUMNS:
        justify: JustifyMethod = "left" if column == "kind" else "right"
        table.add_column(column, footer=footers.get(column, ""), justify=justify, no_wrap=True)
    for layer in layers:
        table.add_row(Text(layer.name.removeprefix(prefix)), *_cells(layer))
    return table


def _cells(layer: LayerReport) -> tuple[str, ...]:
    return (
        layer.block_type or (layer.kind if layer.dictionary is None else f"{layer.kind}, shared"),
        "-" if layer.rank is None else str(layer.rank),
        "-" if layer.nnz is None else count_text(layer.nnz),
        "-" if layer.sparsity is None else percent_text(layer.sparsity),
        count_text(layer.kept_parameters),
        percent_text(layer.compression_ratio),
        "-" if layer.bits_per_weight is None else f"{layer.bits_per_weight:.2f}",
        "-" if layer.kind == "dense" else f"{layer.error:.4f}",
        "-" if layer.kind == "dense" else f"{layer.weight_error:.4f}",
    )


def _totals(report: CompressionReport) -> Iterable[str]:
    totals = report.totals
    if report.calibration.dataset == NO_DATASET:
        yield "Not calibrated: layers are rounded by their weights alone; --preset fast is far better at the same size"
    requested, used = report.settings.calibration.samples, report.calibration.samples
    if 0 < used < requested:
        samples, source = _SAMPLES[report.calibration.kind]
        yield f"Calibrated on {used} {samples}, not the {requested} requested: {source} no more"
    text = report.calibration.text
    is_foreign = text is not None and text.is_foreign
    if text is not None and text.warning is not None:
        yield f"Warning: {text.warning}, --calibration FILE"
    if report.calibration.skipped_rows:
        yield f"Skipped {report.calibration.skipped_rows} rows of {report.calibration.dataset} without usable text"
    if report.calibration.advice is not None:
        yield f"Note: {report.calibration.advice}, --calibration FILE"
    elif report.calibration.dataset == BUILTIN_DATASET and report.calibration.kind == "text" and not is_foreign:
        yield "Calibrated on CPython's documentation; text like what the model will read is better, --calibration FILE"
    if report.calibration_reach is not None:
        yield report.calibration_reach
    # Healing has measured it, and has its own lines.
    if report.evaluation is None and report.healing is None:
        quality = quality_headline(report)
        yield f"Quality: {quality.value}; {quality.detail} (--evaluate builtin, or `rocket evaluate`)"
    if report.calibration.dataset == SYNTHETIC_DATASET:
        kind = report.calibration.kind
        yield f"Calibrated on generated {kind}, which costs quality; use a folder of real data instead"
    yield (
        f"Parameters: {count_text(totals.kept_parameters)} of {count_text(totals.compressible_parameters)} "
        f"compressible ones kept, {percent_text(totals.achieved_ratio)} removed "
        f"({percent_text(totals.model_compression_ratio)} of the whole model's {count_text(totals.model_parameters)})"
    )
    if report.coverage is not None:
        selected = f"Selected: {percent_text(report.coverage.fraction)} of the model's bytes"
        yield selected if report.coverage.warning is None else f"Warning: {report.coverage.warning}"
    yield f"Took {duration_text(report.seconds)}, with at most {bytes_text(report.peak_memory_bytes)} of memory"
    if report.energy_text is not None:
        yield f"Energy: {report.energy_text}, on {'; '.join(report.devices)}"


def _size_tables(report: CompressionReport, output: Path) -> Iterator[Table | str]:
    """Yield the table of sizes, and that of the memory when the result runs, if one was asked for."""
    yield _size_table(report, output)
    if report.memory:
        yield ""
        yield memory_table(report.memory)


def _size_table(report: CompressionReport, output: Path) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=False)
    columns: tuple[JustifyMethod, ...] = ("left", "right", "right", "left")
    for justify in columns:
        table.add_column(justify=justify)
    before = report.totals.dense_bytes
    table.add_row(report.totals.original_text, bytes_text(before), "", report.model)
    for export in report.exports:
        change = percent_text(export.stored_bytes / before - 1, sign="+")
        table.add_row(export.kind, bytes_text(export.stored_bytes), change, str(output / export.folder))
    return table


def print_evaluation_report(report: EvaluationReport) -> None:
    """Write to stdout what a job has measured: quality, and the answers to prompts."""
    models = ("original", report.export)
    caption = f"{report.tokens:,} tokens of {report.dataset}"
    console = wide_console()
    console.print(text_table((caption, *models), quality_rows(report), right=models, is_wide=True))
    _print_answers(console, report.answers)


def print_evaluation(result: "EvaluationResult") -> None:
    """Write a measurement of quality to stdout: a column for each model."""
    models, rows = result.table()
    console = wide_console()
    console.print(text_table((result.caption, *models), rows, right=models, is_wide=True))
    _print_answers(console, result.answers)


def print_healing(report: HealingReport, output: Path) -> None:
    """Write to stdout what healing read and what it changed.

    Args:
        report: the report.
        output: the folder that contains the exports, as the user typed it.
    """
    console = wide_console()
    _print_lines(console, _healing_lines(report))
    console.print(f"Written to {output / 'rocket'}")


def _healing_lines(report: HealingReport) -> Iterable[str]:
    yield (
        f"Healed on {count_text(report.tokens)} tokens of {report.dataset}: {report.steps:,} steps on "
        f"{count_text(report.trained_values)} numbers"
    )
    yield (
        f"KL divergence from the original on {report.held_out_windows} held-out "
        f"{_plural('window', report.held_out_windows)}: {report.divergence_before:.4f} before, "
        f"{report.divergence_after:.4f} after, nats per token"
    )
    if report.kept_step == 0:
        yield "No step made it better there, so nothing was changed: heal on more tokens, or on other text"
    elif report.kept_step < report.steps:
        yield f"The values after step {report.kept_step:,} were kept, which are the best there"
    turns = report.tokens / (report.windows * report.sequence_length)
    if turns >= 1.1:
        yield f"The text has only {report.windows:,} windows, each of which was read {turns:.1f} times"


def print_speed(report: SpeedReport) -> None:
    """Write a measurement of speed to stdout: a row for each model, how it was measured, and what was not."""
    console = wide_console()
    console.print(text_table(SPEED_COLUMNS, speed_rows(report), right=SPEED_COLUMNS[1:-1], is_wide=True))
    console.print(f"Measured in turns: {report.conditions}", style="dim")
    for model in report.unmeasured:
        console.print(f"Not measured: {model.name}: {model.reason}")


def _print_lines(console: Console, lines: Iterable[Table | str]) -> None:
    for line in lines:
        console.print(line)


def _command_lines(commands: Iterable[RunCommand]) -> Iterable[str]:
    for number, command in enumerate(commands):
        yield from [""] * (number > 0)
        yield f"To {command.purpose[0].lower()}{command.purpose[1:]}:"
        yield ""
        for line in command.text.splitlines():
            yield f"    {line}".rstrip()


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def _print_answers(console: Console, answers: Iterable[ComparedAnswer]) -> None:
    """Write answers to prompts, with the place where they part, and in the original's answer how far predictions do."""
    for answer in answers:
        console.print()
        console.print(Text(_shown(f"Prompt: {answer.prompt}"), style="bold"))
        for name, pieces in (("original", pieces_before(answer)), ("compressed", pieces_after(answer))):
            console.print(Text(f"{name}:", style="dim"))
            console.print(_answer_text(pieces))
        console.print(Text(answer.summary, style="dim"))


def _answer_text(pieces: Iterable[Piece]) -> Text:
    text = Text()
    for piece in pieces:
        mark = _PARTING if piece.is_first_difference else ""
        text.append(mark + _shown(piece.text), _STYLES[piece.distance])
    return text


def _shown(text: str) -> str:
    """Return a text without the control characters that a terminal would obey."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text)
