"""Files of a finished compression, read as untrusted: regular files only, without following links."""

import mimetypes
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from app.shared.errors import StorageError
from app.shared.outcomes import NewArtifact
from app.shared.storage import ArtifactStore
from rocket_core.report.layer_groups import summarize_report
from rocket_core.report.quality import EvaluationReport
from rocket_core.report.schema import CompressionReport

REPORT_NAME = "report.json"

_MEDIA_TYPES = {".safetensors": "application/vnd.safetensors", ".md": "text/markdown", ".jinja": "text/plain"}
_REPORTS = (REPORT_NAME, "report.html")
# That of a mixture of 46,000 layers has 40 MiB.
_MAX_REPORT_BYTES = 2**26
# What the service keeps of a report, and reads for every page about it; a mixture of 18,000 layers is within that.
_MAX_KEPT_BYTES = 12 * 2**20
_MAX_EVALUATION_BYTES = 2**22
_MAX_FILES = 10_000
_MAX_NAME = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredResult:
    """A complete compression whose files are stored but not yet published."""

    report: CompressionReport
    artifacts: tuple[NewArtifact, ...]


def read_report(output: Path) -> CompressionReport:
    """Return the report of a compression as the service keeps it, with the layers of a very large mixture summarised.

    Raises:
        StorageError: it is missing, not a regular file, too large, or not a report.
    """
    try:
        descriptor = os.open(output / REPORT_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"the report of the compression cannot be read: {error.strerror}; retry the job") from error
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise StorageError("the report of the compression is not a regular file; retry the job")
        text = stream.read(_MAX_REPORT_BYTES + 1)
    if len(text) > _MAX_REPORT_BYTES:
        raise StorageError(f"the report of the compression has more than {_MAX_REPORT_BYTES} bytes; retry the job")
    try:
        report = CompressionReport.model_validate_json(text)
    except ValidationError as error:
        raise StorageError("the report of the compression is damaged; retry the job") from error
    if any(export.folder != export.kind for export in report.exports):
        raise StorageError("the report of the compression names a folder that is not an artifact's; retry the job")
    return _kept(report)


def _kept(report: CompressionReport) -> CompressionReport:
    kept = report if _size(report) <= _MAX_KEPT_BYTES else summarize_report(report)
    if _size(kept) > _MAX_KEPT_BYTES or any(len(layer.name) > _MAX_NAME for layer in kept.layers):
        raise StorageError(
            f"the report of the compression has more than {_MAX_KEPT_BYTES} bytes beyond its layers, or a layer's name "
            f"more than {_MAX_NAME} characters; check the names in the checkpoint and the tokenizer"
        )
    if kept.evaluation is not None:
        check_evaluation(kept.evaluation)
    return kept


def check_evaluation(report: EvaluationReport) -> None:
    """Raise an error unless an evaluation is small enough for a page.

    Raises:
        StorageError: it is too large.
    """
    if _size(report) > _MAX_EVALUATION_BYTES:
        raise StorageError(
            f"the evaluation has more than {_MAX_EVALUATION_BYTES} bytes; give fewer prompts, or lower answer_tokens"
        )


def _size(report: CompressionReport | EvaluationReport) -> int:
    return len(report.model_dump_json())


def result_files(report: CompressionReport, output: Path) -> list[Path]:
    """Return the files that a compression publishes, sorted.

    Raises:
        StorageError: something in the artifacts' folders is neither a folder nor a regular file.
    """
    files: list[Path] = []
    for name in (*_REPORTS, *(export.folder for export in report.exports)):
        for file in _regular_files(output / name):
            if len(files) == _MAX_FILES:
                raise StorageError(f"the compression created more than {_MAX_FILES} files; retry the job")
            files.append(file)
    for file in files:
        name = file.relative_to(output).as_posix()
        if len(name) > _MAX_NAME or not name.isprintable():
            raise StorageError("the compression created a file with an invalid name; retry the job")
    return sorted(files)


def store_files(
    store: ArtifactStore, files: Sequence[Path], output: Path, *, before_each: Callable[[], None]
) -> Iterator[NewArtifact]:
    """Store files one by one.

    Args:
        store: the store.
        files: the files.
        output: folder that the names of the artifacts are relative to.
        before_each: called before each file.

    Yields:
        The stored artifacts.
    """
    for file in files:
        before_each()
        stored = store.put(file)
        yield NewArtifact(
            name=file.relative_to(output).as_posix(),
            storage_key=stored.key,
            size=stored.size,
            sha256=stored.sha256,
            media_type=_media_type(file),
        )


def _regular_files(path: Path) -> Iterator[Path]:
    mode = _mode(path)
    if stat.S_ISREG(mode):
        yield path
    elif stat.S_ISDIR(mode):
        for entry in sorted(path.iterdir()):
            yield from _regular_files(entry)
    else:
        raise StorageError(f"{path.name} is not a regular file; only those can be artifacts")


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except OSError as error:
        raise StorageError(f"{path.name} of the compression cannot be read: {error.strerror}; retry the job") from error


def _media_type(file: Path) -> str:
    known = _MEDIA_TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0]
    return known or "application/octet-stream"
