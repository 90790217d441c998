"""Rows of text files and tables, and what of a row is text or a chat. Loads no torch."""

import csv
import io
import json
import lzma
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fsspec.compression import compr
from fsspec.utils import infer_compression

from rocket_core.errors import CalibrationError, UnknownDatasetError

TEXT_SUFFIXES = (".txt", ".md")
"""Files that are one text each."""
TABLE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
"""Files of rows."""
TEXT_COLUMN = "text"

# Longer than any text; the module's default refuses texts above 128 KiB.
_MAX_CSV_FIELD = 2**31 - 1
_PARQUET_BATCH = 256
_DAMAGED = (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)

# Roles of chat templates, by those of ShareGPT and its relatives.
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_KNOWN_COLUMNS = (
    '"text", "messages", "conversations", "instruction" with "output", or "prompt" with "completion"; or name the '
    "column that has the text (--calibration-column, calibration.column)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of a table, or a text file.

    Attributes:
        where: names file and row in messages.
        fields: values by column; a text file has one, `text`.
    """

    where: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """A conversation, for a chat template.

    Attributes:
        where: names file and row in messages.
        content: JSON object of `messages` and perhaps `tools`, as `apply_chat_template` takes them. As text it needs
            a fraction of the memory.
    """

    where: str
    content: str


def text_suffix(path: Path) -> str | None:
    """Return the suffix of a text file or table, without that of a compression; None for other files."""
    inner = Path(path.stem) if infer_compression(path.name) else path
    suffix = inner.suffix.lower()
    return suffix if suffix in (*TEXT_SUFFIXES, *TABLE_SUFFIXES) else None


def text_files(folder: Path) -> list[Path]:
    """Return the `.txt` and `.md` files at the top level of a folder, by name."""
    return sorted(file for file in folder.iterdir() if text_suffix(file) in TEXT_SUFFIXES and file.is_file())


def read_rows(path: Path, name: str | None = None) -> Iterator[Row]:
    """Yield the rows of a text file, a table, or the text files of a folder, in order.

    A file is read as it is requested, but for `.txt`, `.md` and arrays of `.json`, which are read as a whole.

    Args:
        path: a file for which `text_suffix` is not None, or a folder.
        name: its name in messages; None for the path.

    Raises:
        UnknownDatasetError: it cannot be read.
        CalibrationError: it is not of the kind that its suffix names; the message names file and row.
    """
    shown = name or str(path)
    if path.is_dir():
        for inner in text_files(path):
            yield from read_rows(inner, f"{shown}/{inner.name}")
        return
    opener = compr[infer_compression(path.name)]
    try:
        with path.open("rb") as raw, raw if opener is None else opener(raw, mode="rb") as file:
            yield from _rows(file, text_suffix(path), shown)
    except _DAMAGED as error:
        raise CalibrationError(f"{shown} cannot be decompressed ({error}); fetch it again") from error
    except OSError as error:
        raise UnknownDatasetError(
            f"text file {shown} cannot be read: {error.strerror or error}; check the path"
        ) from error


def row_document(row: Row, column: str | None = None) -> str | Chat:
    """Return the text of a row, or the conversation that it is.

    Without a column this is `text`, else `messages` (OpenAI), `conversations` (ShareGPT), `instruction`, `input` and
    `output` (Alpaca), or `prompt` and `completion`; `system` and `tools` of a row belong to its conversation.

    Args:
        row: the row.
        column: the column to take, with a text or a list of messages.

    Raises:
        CalibrationError: the row has neither; the message names it.
    """
    fields = row.fields
    if column is None and isinstance(fields.get(TEXT_COLUMN), str):
        return checked_text(fields[TEXT_COLUMN], row.where, TEXT_COLUMN)
    if column is not None:
        if isinstance(fields.get(column), str):
            return checked_text(fields[column], row.where, column)
        messages = _messages(fields.get(column), row.where)
        problem = f"has no text in the column {column!r}, only the columns {', '.join(map(repr, fields))}"
    else:
        messages = _found_messages(row)
        problem = f'has no string "text" and no chat; each row needs {_KNOWN_COLUMNS}'
    if not messages:
        raise CalibrationError(f"{row.where} {problem}")
    system = fields.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    chat: dict[str, Any] = {"messages": messages}
    tools = _parsed(fields.get("tools"))
    if isinstance(tools, list) and tools:
        chat["tools"] = tools
    return Chat(where=row.where, content=checked_text(json.dumps(chat, ensure_ascii=False), row.where, "messages"))


def read_record(line: bytes, *, where: str) -> Mapping[str, Any]:
    """Return the JSON object on a line of a `.jsonl` file.

    Args:
        line: the line.
        where: names file and line in messages.

    Raises:
        CalibrationError: not UTF-8, or not a JSON object.
    """
    try:
        record = json.loads(decoded(line, where=where))
    except (ValueError, RecursionError) as error:
        raise CalibrationError(
            f'{where} is not valid JSON ({error}); each line must be like {{"text": "..."}}'
        ) from error
    return _as_object(record, where)


def decoded(piece: bytes, *, where: str) -> str:
    """Return text from UTF-8.

    Args:
        piece: a line or a file.
        where: names it in messages.

    Raises:
        CalibrationError: it is not UTF-8.
    """
    try:
        return piece.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"{where} is not UTF-8 text (byte {piece[error.start]:#04x} at offset {error.start}); convert it to UTF-8"
        ) from error


def checked_text(text: str, where: str, column: str) -> str:
    """Return a text, after checking that a tokenizer takes it.

    Args:
        text: the text.
        where: names file and row in messages.
        column: its column.

    Raises:
        CalibrationError: it has a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON can escape half of a surrogate pair, which tokenizers reject.
        raise CalibrationError(
            f'{where}: "{column}" holds a lone surrogate, which is no character; remove it'
        ) from error
    return text


def without_nulls(value: Any) -> Any:
    """Return a value without null members, which Arrow adds to objects so that all have the same members."""
    if isinstance(value, Mapping):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def _rows(file: IO[bytes], suffix: str | None, shown: str) -> Iterator[Row]:
    match suffix:
        case ".csv":
            yield from _csv_rows(file, shown)
        case ".parquet":
            yield from _parquet_rows(file, shown)
        case ".json" | ".jsonl":
            yield from _json_rows(file, shown, may_be_array=suffix == ".json")
        case _:
            content = file.read()
            if content.strip():
                yield Row(where=shown, fields={TEXT_COLUMN: decoded(content, where=shown)})


def _json_rows(file: IO[bytes], shown: str, *, may_be_array: bool) -> Iterator[Row]:
    # Only "\n" ends a line of JSON Lines; other Unicode line breaks do not.
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        if may_be_array and line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            yield from _array_rows(line + file.read(), shown)
            return
        may_be_array = False
        where = f"{shown}, line {number}"
        yield Row(where=where, fields=read_record(line, where=where))


def _array_rows(content: bytes, shown: str) -> Iterator[Row]:
    try:
        records = json.loads(decoded(content, where=shown))
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{shown} is not valid JSON ({error}); correct it, or give one object a line") from error
    for number, record in enumerate(records, start=1):
        where = f"{shown}, row {number}"
        yield Row(where=where, fields=_as_object(record, where))


def _csv_rows(file: IO[bytes], shown: str) -> Iterator[Row]:
    csv.field_size_limit(_MAX_CSV_FIELD)
    number = 0
    try:
        with io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
            for number, fields in enumerate(csv.DictReader(text), start=1):
                yield Row(where=f"{shown}, row {number}", fields={str(name): value for name, value in fields.items()})
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{shown} is not UTF-8 text after row {number}; convert it to UTF-8") from error
    except csv.Error as error:
        raise CalibrationError(f"{shown} is not valid CSV after row {number} ({error}); correct it") from error


def _parquet_rows(file: IO[bytes], shown: str) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise CalibrationError(f"{shown}: reading parquet needs pyarrow; install rocket-compress[torch]") from error
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=_PARQUET_BATCH):
            for fields in batch.to_pylist():
                number += 1
                yield Row(where=f"{shown}, row {number}", fields=without_nulls(fields))
    except pyarrow.ArrowException as error:
        raise CalibrationError(f"{shown} cannot be read as parquet ({error}); fetch or write it again") from error


def _as_object(record: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(record, dict):
        raise CalibrationError(f'{where} is not a JSON object; each must be like {{"text": "..."}}')
    return record


def _found_messages(row: Row) -> list[dict[str, Any]]:
    fields = row.fields
    for column in ("messages", "conversations"):
        messages = _messages(fields.get(column), row.where)
        if messages:
            return messages
    if isinstance(fields.get("instruction"), str) and isinstance(fields.get("output"), str):
        asked = [text for text in (fields["instruction"], fields.get("input")) if isinstance(text, str) and text]
        return _exchange("\n\n".join(asked), fields["output"])
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return _exchange(prompt, completion)
    return [*_messages(prompt, row.where), *_messages(completion, row.where)] if completion is not None else []


def _exchange(asked: str, answered: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Return a list of messages with role and content; empty for anything but a list of objects."""
    listed = _parsed(value)
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not _all_objects(listed):
        return []
    return [_message(message, where) for message in listed]


def _all_objects(values: Iterable[Any]) -> bool:
    return all(isinstance(value, Mapping) for value in values)


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if isinstance(message.get("role"), str):
        # Templates read the content of every message, and a call of a tool has none.
        return {"content": None, **message}
    role = message.get("from")
    if role == "function_call":
        call = _parsed(message.get("value"))
        calls = call if isinstance(call, list) else [call]
        if calls and _all_objects(calls):
            functions = [{"type": "function", "function": function} for function in calls]
            return {"role": "assistant", "content": "", "tool_calls": functions}
    elif isinstance(role, str) and role in _ROLES and "value" in message:
        return {"role": _ROLES[role], "content": message["value"]}
    raise CalibrationError(
        f'{where} has a message with neither "role" nor a known "from" ({", ".join(_ROLES)}, function_call); correct it'
    )


def _parsed(value: Any) -> Any:
    """Return what a string of JSON holds, as tables without nested columns have it; other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
