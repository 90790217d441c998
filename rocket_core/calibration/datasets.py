"""Calibration text: sources of documents, and cutting them into windows of tokens."""

import ast
import re
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics as pydoc_topics
from typing import TypeVar

import numpy as np
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError

# The base error of the HTTP client, which is httpx or httpx2 depending on the release of `huggingface_hub`.
from huggingface_hub.errors import HTTPError as HttpClientError  # type: ignore[attr-defined]
from jaxtyping import Int64
from transformers import PreTrainedTokenizerBase

from rocket_core.calibration.chats import RowReader
from rocket_core.config import BUILTIN_DATASET
from rocket_core.errors import CalibrationError, EmptyCalibrationError, HubUnavailableError
from rocket_core.inspection.files.dataset_names import LOCAL_FILES, HubDatasetName, hub_dataset_name, local_path_of
from rocket_core.inspection.files.text_rows import TEXT_SUFFIXES, Chat, Row, read_rows, text_suffix, without_nulls
from rocket_core.models.pretrained import tokenize
from rocket_core.system.gc_pause import no_collection

# Whole topics of `pydoc_data` that `builtin` leaves out: the text on which the bundled model is evaluated.
HELD_OUT_TOPICS = ("assignment", "calls", "execmodel", "import")


# Hub streams are shuffled within a buffer of this many documents; `datasets` also shuffles the files they come from.
_SHUFFLE_BUFFER = 1000

# `documents` cuts a text file at blank lines into passages of at least this many characters.
_PASSAGE_CHARACTERS = 8192

# Folders of the standard library without prose, or that some distributions leave out of a CPython installation.
_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "distutils",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib-dynload",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "tkinter",
        "turtledemo",
    }
)

_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")

_Found = TypeVar("_Found")
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

# Fields of a syntax tree node that hold statements, or nodes that contain statements.
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")


@dataclass(frozen=True, kw_only=True, slots=True)
class _HubDataset:
    """The location of a data set on the Hub. All consist of data files, because `datasets` does not run scripts.

    Attributes:
        repository: `owner/name`.
        fields: columns that form the text, joined by newlines; empty ones are left out.
        config: configuration; None if there is only one.
        revision: branch; None for `main`.
        data_files: pattern of the files, for branches without a card that names a configuration.
        rows: consecutive rows that form one document, for data sets whose rows are lines.
        separator: text between the rows of a document.
    """

    repository: str
    fields: tuple[str, ...]
    config: str | None = None
    revision: str | None = None
    data_files: str | None = None
    rows: int = 1
    separator: str = "\n"


_HUB = {
    # A row is a line that ends in a newline; articles follow one another.
    "wikitext2": _HubDataset(
        repository="Salesforce/wikitext", config="wikitext-2-raw-v1", fields=("text",), rows=64, separator=""
    ),
    # `main` holds a script; the Hub's conversion to parquet has neither a card nor named configurations.
    "ptb": _HubDataset(
        repository="ptb-text-only/ptb_text_only",
        revision="refs/convert/parquet",
        data_files="penn_treebank/train/*.parquet",
        fields=("sentence",),
        rows=64,
    ),
    "alpaca": _HubDataset(repository="tatsu-lab/alpaca", fields=("instruction", "input", "output")),
    "refinedweb": _HubDataset(repository="tiiuae/falcon-refinedweb", fields=("content",)),
    "c4": _HubDataset(repository="allenai/c4", config="en", fields=("text",)),
}


def documents(dataset: str, *, seed: int, token: str | None = None, reader: RowReader | None = None) -> Iterator[str]:
    """Return the documents of a data set in an order determined by the seed.

    `builtin` and local files are shuffled as a whole, in memory; Hub data are streamed and shuffled by file and within
    a buffer. Text files are cut at blank lines into passages of about eight thousand characters, so that there is
    something to shuffle; `file_documents` keeps them whole.

    Args:
        dataset: as in `CalibrationConfig.dataset`.
        seed: at least 0; equal seeds give equal orders.
        token: Hub token, for gated data; None uses the token of this machine's user, if any.
        reader: how rows become texts; None reads those that need no chat template.

    Returns:
        An iterator, lazy for Hub data. Chats are rendered when they are requested.

    Raises:
        UnknownDatasetError: no such name or file.
        HubUnavailableError: the Hub does not answer, now or while the documents are read.
        EmptyCalibrationError: a local file contains no text.
        CalibrationError: a row is malformed, or Hub data are not as expected.
    """
    path, named = local_path_of(dataset), hub_dataset_name(dataset)
    reader = reader or RowReader()
    if dataset in _HUB:
        return _hub_documents(_HUB[dataset], seed=seed, token=token)
    if named is not None:
        return reader.rendered(reader.read(_hub_rows(named, seed=seed, token=token)))
    read: list[str | Chat]
    if path is None:
        read = [*builtin_documents()]
    elif path.is_dir() or text_suffix(path) in TEXT_SUFFIXES:
        read = [passage for text in file_documents(path, reader) for passage in _passages(text)]
    else:
        read = [*_filled(reader.read(read_rows(path)), path)]
    return reader.rendered(read[index] for index in np.random.default_rng(seed).permutation(len(read)))


def file_documents(path: Path, reader: RowReader | None = None) -> Iterator[str]:
    """Yield the documents of a local file, or of the text files of a folder, in order, as evaluation requires.

    Args:
        path: a text file, which is one document, a table, or a folder; see `read_rows` and `row_document`. A row is
            read only when its document is requested.
        reader: how rows become texts; None reads those that need no chat template.

    Yields:
        Documents.

    Raises:
        UnknownDatasetError: the file cannot be read.
        EmptyCalibrationError: the file contains no text.
        CalibrationError: a row is malformed, or has neither text nor a chat; the message names file and row.
    """
    reader = reader or RowReader()
    return reader.rendered(_filled(reader.read(read_rows(path)), path))


def _filled(found: Iterable[_Found], path: Path) -> Iterator[_Found]:
    """Yield all that was found; raise EmptyCalibrationError if that is nothing."""
    empty = True
    for each in found:
        yield each
        empty = False
    if empty:
        raise EmptyCalibrationError(f"{path} holds no text; give at least one document")


def token_windows(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, count: int | None, length: int
) -> Int64[torch.Tensor, "windows length"]:
    """Cut the concatenated tokens of documents into windows.

    Each document is preceded by the tokenizer's BOS token (EOS if it has no BOS, nothing if it has neither) and gets no
    other special tokens. Reading stops as soon as there are enough tokens; an incomplete last window is dropped.

    Args:
        texts: documents; those without tokens add nothing.
        tokenizer: the model's tokenizer.
        count: number of windows, at least 1; None takes all.
        length: tokens per window, at least 1.

    Returns:
        At most `count` windows on the CPU; fewer if the documents run out.

    Raises:
        EmptyCalibrationError: the text does not fill one window.
    """
    separator = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    opening = [] if separator is None else [separator]
    tokens: list[int] = []
    for text in texts:
        # verbose=False: no warning for documents longer than the model's context, as they are cut into windows.
        encoded = tokenize(tokenizer, text, add_special_tokens=False, verbose=False)["input_ids"]
        if encoded:
            tokens += opening
            tokens += encoded
        if count is not None and len(tokens) >= count * length:
            break
    windows = len(tokens) // length if count is None else min(count, len(tokens) // length)
    if windows == 0:
        raise EmptyCalibrationError(
            f"the text has {len(tokens)} tokens, one window needs {length}; give more text or a shorter sequence length"
        )
    return torch.tensor(tokens[: windows * length], dtype=torch.int64).reshape(windows, length)


def document_windows(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, count: int, length: int
) -> list[Int64[torch.Tensor, "1 tokens"]]:
    """Return the start of each document as a window, preceded by the tokenizer's BOS token if it has one.

    Args:
        texts: documents; those of less than two tokens, with nothing to predict, are left out.
        tokenizer: the model's tokenizer.
        count: most windows, at least 1.
        length: most tokens of a window, at least 2.

    Raises:
        EmptyCalibrationError: no document has two tokens.
    """
    opening = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    windows = []
    for text in texts:
        encoded = tokenize(tokenizer, text, add_special_tokens=False, verbose=False)["input_ids"]
        tokens = [*opening, *encoded][:length]
        if encoded and len(tokens) > 1:
            windows.append(torch.tensor([tokens], dtype=torch.int64))
        if len(windows) == count:
            break
    if not windows:
        raise EmptyCalibrationError("no text has two tokens, which a window needs at least; give longer texts")
    return windows


def held_out_text() -> str:
    """Return the topics in `HELD_OUT_TOPICS` that the running CPython documents, joined by blank lines."""
    return "\n\n".join(pydoc_topics[name].strip() for name in HELD_OUT_TOPICS if name in pydoc_topics) + "\n"


def builtin_documents() -> list[str]:
    """Return the documentation that ships with CPython, without the held-out text.

    First come the topics of `pydoc_data` by name, then the docstrings of each standard library module, modules by path
    and docstrings in source order. No module is imported. The topics in `HELD_OUT_TOPICS` are left out, and so are
    paragraphs elsewhere that equal a held-out one up to white space, because topics repeat each other. The text differs
    slightly between versions of CPython. The first call parses the standard library, which takes some seconds.

    Returns:
        About 1.7 million characters, always in the same order.
    """
    return list(_builtin_documents())


@cache
def _builtin_documents() -> tuple[str, ...]:
    held_out = {_normalised(paragraph) for paragraph in _paragraphs(held_out_text())}
    topics = (pydoc_topics[name] for name in sorted(pydoc_topics) if name not in HELD_OUT_TOPICS)
    texts = (
        "\n\n".join(paragraph for paragraph in _paragraphs(text) if _normalised(paragraph) not in held_out)
        for text in chain(topics, _standard_library_docstrings())
    )
    with no_collection():
        return tuple(text for text in texts if text)


def _standard_library_docstrings() -> Iterator[str]:
    for path in _modules(Path(sysconfig.get_path("stdlib"))):
        docstrings = _docstrings(ast.parse(path.read_bytes()))
        if docstrings:
            yield "\n\n".join(docstrings)


def _modules(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py":
            yield path
        elif path.is_dir() and path.name not in _SKIPPED_FOLDERS:
            yield from _modules(path)


def _docstrings(tree: ast.Module) -> list[str]:
    documented = (node for node in _statements(tree) if isinstance(node, _Documented))
    in_source_order = sorted(documented, key=lambda node: node.body[0].lineno if node.body else 0)
    return [docstring for node in in_source_order if (docstring := ast.get_docstring(node))]


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    # Not `ast.walk`: nearly all of its nodes are expressions, which contain no docstrings.
    nodes: list[ast.AST] = [tree]
    for node in nodes:
        nodes += chain.from_iterable(getattr(node, block, ()) for block in _BLOCKS)
        yield node


def _paragraphs(text: str) -> list[str]:
    return [paragraph.rstrip() for paragraph in _BLANK_LINES.split(text.strip("\n")) if paragraph.strip()]


def _normalised(paragraph: str) -> str:
    return " ".join(paragraph.split())


def _passages(text: str) -> Iterator[str]:
    passage: list[str] = []
    characters = 0
    for paragraph in _paragraphs(text):
        passage.append(paragraph)
        characters += len(paragraph)
        if characters >= _PASSAGE_CHARACTERS:
            yield "\n\n".join(passage)
            passage, characters = [], 0
    if passage:
        yield "\n\n".join(passage)


def _hub_documents(source: _HubDataset, *, seed: int, token: str | None) -> Iterator[str]:
    import datasets

    with _hub_errors(source.repository):
        stream = datasets.load_dataset(
            source.repository,
            name=source.config,
            data_files=None if source.data_files is None else {"train": source.data_files},
            split="train",
            revision=source.revision,
            streaming=True,
            token=token,
        )
        # Join rows into documents before shuffling, which separates consecutive rows.
        for batch in stream.batch(source.rows).shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER):
            missing = [field for field in source.fields if field not in batch]
            if missing:
                raise CalibrationError(
                    f"the data set {source.repository} has no column {', '.join(missing)} any more, only"
                    f" {', '.join(batch)}; calibrate on {BUILTIN_DATASET!r} or a local file"
                )
            rows = zip(*(batch[field] for field in source.fields), strict=True)
            yield source.separator.join("\n".join(text for text in row if text) for row in rows)


def _hub_rows(name: HubDatasetName, *, seed: int, token: str | None) -> Iterator[Row]:
    import datasets

    with _hub_errors(name.repository):
        stream = datasets.load_dataset(
            name.repository, name=name.config, split=name.split, streaming=True, token=token
        ).shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER)
        for number, fields in enumerate(stream, start=1):
            yield Row(where=f"{name.repository}, shuffled row {number}", fields=without_nulls(fields))


@contextmanager
def _hub_errors(repository: str) -> Iterator[None]:
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (ConnectionError, TimeoutError, LocalEntryNotFoundError) as error:
        raise HubUnavailableError(
            f"the hub does not answer for the data set {repository} ({error}); try again, or calibrate on"
            f" {BUILTIN_DATASET!r} or a local {LOCAL_FILES} file"
        ) from error
    except (DatasetsError, RepositoryNotFoundError, EntryNotFoundError, FileNotFoundError, ValueError) as error:
        raise CalibrationError(
            f"the data set {repository} cannot be read from the hub ({error}); log in if it is gated, or calibrate on"
            f" {BUILTIN_DATASET!r} or a local file"
        ) from error
    except HttpClientError as error:
        raise HubUnavailableError(f"the hub failed to serve the data set {repository} ({error}); try again") from error
