"""Files of an export next to its weights: settings, tokenizer, card and report."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rocket_core.engines import ExportKind
from rocket_core.errors import CorruptCheckpointError
from rocket_core.inspection.files.model_files import CONFIG_NAME, companions, copy_file, read_file
from rocket_core.inspection.files.unsafe_settings import without_code
from rocket_core.report.html import render_report
from rocket_core.report.model_card import model_card
from rocket_core.report.schema import CompressionReport
from rocket_core.system.files import atomic_write

REPORT_NAME = "report.json"
PAGE_NAME = "report.html"
CARD_NAME = "README.md"

# Files that may name code: classes shipped with the model.
_SETTINGS = frozenset(
    {"generation_config.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.json"}
)


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the content of a model's `config.json`, without what names code."""
    settings: dict[str, Any] = without_code(json.loads(read_file(folder, CONFIG_NAME)))
    return settings


def write_settings(folder: Path, settings: Mapping[str, Any], added: Mapping[str, Any]) -> None:
    """Write the `config.json` of an export.

    Args:
        folder: the export.
        settings: the model's settings.
        added: what tells how weights are stored, by the name of the setting.
    """
    _write(folder / CONFIG_NAME, _json({**settings, **added}))


def copy_companions(source: Path, name: str, folder: Path) -> None:
    """Copy the files that a model needs in addition to weights and `config.json`; what names code is left out.

    Args:
        source: folder of the model.
        name: its name in messages.
        folder: the export.
    """
    for file in companions(source, name):
        (folder / file).parent.mkdir(exist_ok=True)
        settings = json.loads(read_file(source, str(file))) if str(file) in _SETTINGS else None
        cleaned = without_code(settings) if isinstance(settings, dict) else settings
        if cleaned == settings:
            copy_file(source, file, folder / file)
        else:
            (folder / file).write_bytes(_json(cleaned))


def artifact_folders(output: Path) -> tuple[Path, ...]:
    """Return where the artifact in an output folder may be; earlier versions called its export `factored`."""
    return output / "rocket", output / "factored"


def write_description(folder: Path, report: CompressionReport, kind: ExportKind, source: Path) -> None:
    """Write card and report of an export.

    Args:
        folder: the export.
        report: report of the compression, which names the export.
        kind: kind of the export.
        source: folder with the card of the original, or of another export of it.
    """
    _write(folder / CARD_NAME, model_card(report, kind, source).encode())
    write_report(folder, report)


def read_report(folder: Path) -> CompressionReport | None:
    """Return the report in the folder of an export; None if it has no report.

    Raises:
        CorruptCheckpointError: it is damaged, or of another version.
    """
    file = folder / REPORT_NAME
    if not file.is_file():
        return None
    try:
        return CompressionReport.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise CorruptCheckpointError(
            f"{file} is damaged, or was written by another version of rocket-compress ({error.error_count()} "
            "problems); copy it again, or remove it to go on without a report"
        ) from error


def write_report(folder: Path, report: CompressionReport) -> None:
    """Write a report as a page, and then as JSON."""
    _write(folder / PAGE_NAME, render_report(report).encode())
    _write(folder / REPORT_NAME, (report.model_dump_json(indent=1) + "\n").encode())


def _write(file: Path, content: bytes) -> None:
    with atomic_write(file) as stream:
        stream.write(content)


def _json(settings: object) -> bytes:
    return (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
