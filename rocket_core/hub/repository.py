"""Queries to the Hugging Face Hub: a model's commit, files, config.json and safetensors headers. Loads no torch.

Only those few kilobytes are downloaded, and nothing is stored on disk.
"""

import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from http import HTTPStatus
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote

import httpx2
from huggingface_hub import constants, get_session, get_token, hf_hub_url, hf_raise_for_status
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from rocket_core.errors import HubUnavailableError, ModelNotFoundError
from rocket_core.inspection.files.model_advice import advice_on_contents, advice_on_path
from rocket_core.inspection.files.safetensors_headers import (
    INDEX_NAME,
    PREFIX_BYTES,
    SUFFIX,
    TensorHeader,
    header_length,
    parse_header,
    weight_files,
)
from rocket_core.inspection.headers.coded_tensors import coded_format
from rocket_core.inspection.headers.weight_summary import WeightSummary, summarize_files
from rocket_core.version import __version__

# Weights as safetensors, configuration and tokenizer; never pickles, never code.
PATTERNS = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "LICENSE*", "NOTICE*", "README.md")
IGNORED = ("*/*", "consolidated*")

# A service does not repeat names that a client sent.
_SUBJECT = "the model repository"
# Limits that keep the work small; beyond them the headers are not read.
_MAX_FILES = 64
_MAX_LISTING_BYTES = 2**24
_MAX_CONFIG_BYTES = 2**22
_MAX_INDEX_BYTES = 2**24
_MAX_HEADER_BYTES = 2**22
_MAX_ALL_HEADERS_BYTES = 2**24
_MAX_TENSORS = 100_000
# Digits of a file's size in bytes.
_MAX_SIZE_DIGITS = 19
_CONNECTIONS = 4
# Most headers are shorter, so that a single request reads them.
_FIRST_BYTES = 100_000
_MAY_SUCCEED_LATER = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}


class _GivenUpError(Exception):
    """Continuing to read would take too long or too much memory."""


class _Allowance:
    """Headers that may still be parsed, shared by all threads."""

    def __init__(self) -> None:
        self._bytes, self._tensors = _MAX_ALL_HEADERS_BYTES, _MAX_TENSORS
        self._lock = Lock()

    def spend(self, *, byte_count: int = 0, tensors: int = 0) -> None:
        with self._lock:
            self._bytes -= byte_count
            self._tensors -= tensors
            if self._bytes < 0 or self._tensors < 0:
                raise _GivenUpError


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    status: int
    headers: httpx2.Headers
    body: bytes

    def whole_size(self) -> int:
        part, length = self.headers.get("Content-Range", ""), self.headers.get("Content-Length", "")
        size: str = part.rpartition("/")[2] or length
        if not size.isdecimal() or len(size) > _MAX_SIZE_DIGITS:
            # The size is hidden by a proxy, so the header cannot be checked against it.
            raise _GivenUpError
        return int(size)


@dataclass(frozen=True, kw_only=True, slots=True)
class HubAccess:
    """Credentials and cache directory for Hub access.

    Attributes:
        token: the Hub's token; None uses that of this machine's user, if any.
        cache: directory for downloads; None is this machine's cache. Clients with their own token need their own
            directory: files in a shared one are served without an access check.
        quota_bytes: bytes that models in the cache may take; the least recently used ones that no process holds are
            removed. None never removes anything.
    """

    token: str | None = field(default=None, repr=False)
    cache: Path | None = None
    quota_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Repository:
    """A model repository at one commit.

    Attributes:
        model: its id, `namespace/name`.
        commit: the commit.
        sizes: the files at the top level, with their bytes; None if the Hub does not report them.
        subject: name of the repository in messages.
        token: the Hub's token; None uses that of this machine's user, if any.
        deadline: time by which the Hub must have answered all requests, on the clock of `time.monotonic`.
    """

    model: str
    commit: str
    sizes: Mapping[str, int | None]
    token: str | None = field(repr=False)
    deadline: float
    subject: str = _SUBJECT

    @property
    def files(self) -> frozenset[str]:
        """Names of the files at the top level."""
        return frozenset(self.sizes)

    def wanted_files(self) -> tuple[str, ...]:
        """Return the files that make up the model: weights as safetensors, configuration, tokenizer, licence.

        Raises:
            CheckpointFormatError: the repository contains no safetensors.
            CorruptCheckpointError: the index is damaged, or a file is missing.
            HubUnavailableError: the Hub fails to answer.
        """
        with hub_errors(self.subject):
            weights = self.weight_files()
        wanted = {name for name in self.files if any(fnmatch(name, pattern) for pattern in PATTERNS)}
        return tuple(sorted([*weights, *(name for name in wanted if not name.endswith(SUFFIX))]))

    def weight_files(self) -> tuple[str, ...]:
        """Return the safetensors that make up the model; exceptions of the Hub's client are propagated."""
        return weight_files(self.files, self._read_index, self.subject)

    def read_config(self) -> bytes:
        """Return the content of config.json.

        Raises:
            ModelNotFoundError: the file does not exist, or access is denied.
            HubUnavailableError: the Hub does not answer in time.
        """
        if "config.json" not in self.files:
            raise ModelNotFoundError(f"{self.subject} has no config.json; {advice_on_contents(self.files)}")
        with hub_errors(self.subject):
            return self._read_whole("config.json", _MAX_CONFIG_BYTES)

    def read_weights(self, settings: Mapping[str, Any] | None = None) -> WeightSummary | None:
        """Return the dtypes and shapes of the weights; None if that would take too long or too many requests.

        Args:
            settings: the content of config.json, which says how weights in few bits are stored; None for
                plain weights.

        Raises:
            CheckpointFormatError: the repository contains no safetensors.
            CorruptCheckpointError: an index or header is damaged, or a file is missing.
            HubUnavailableError: the Hub fails to answer.
        """
        with hub_errors(self.subject):
            try:
                files = self.weight_files()
                if len(files) > _MAX_FILES:
                    return None
                allowance = _Allowance()
                with ThreadPoolExecutor(min(_CONNECTIONS, len(files))) as pool:
                    headers = pool.map(lambda file: self._headers(file, allowance), files)
                    return summarize_files(headers, self.subject, coded_format(settings or {}, self.subject))
            except (_GivenUpError, httpx2.TimeoutException):
                return None

    def _read_index(self) -> bytes:
        return self._read_whole(INDEX_NAME, _MAX_INDEX_BYTES)

    def _headers(self, file: str, allowance: "_Allowance") -> list[TensorHeader]:
        name = f"{file} of {self.subject}"
        answer = self._read_part(file, 0, _FIRST_BYTES)
        size = answer.whole_size()
        length = header_length(answer.body[:PREFIX_BYTES], size, name)
        allowance.spend(byte_count=length)
        header = answer.body[PREFIX_BYTES : PREFIX_BYTES + length]
        if len(header) < length:
            if length > _MAX_HEADER_BYTES:
                raise _GivenUpError
            header = self._read_part(file, PREFIX_BYTES, length).body
        # Reading another file's header may have used up the time.
        _seconds_left(self.deadline)
        tensors = parse_header(header, size, name)
        allowance.spend(tensors=len(tensors))
        return tensors

    def _read_whole(self, file: str, most: int) -> bytes:
        url = hf_hub_url(self.model, file, revision=self.commit)
        answer = _get(url, token=self.token, deadline=self.deadline, most=most)
        if len(answer.body) >= most:
            raise _GivenUpError
        return answer.body

    def _read_part(self, file: str, first: int, count: int) -> _Answer:
        """Return bytes of a file from a position onwards."""
        url = hf_hub_url(self.model, file, revision=self.commit)
        part = {"Range": f"bytes={first}-{first + count - 1}"}
        answer = _get(url, token=self.token, deadline=self.deadline, most=first + count, headers=part)
        # A server may send the whole file instead of the range.
        skipped = first if answer.status == HTTPStatus.OK else 0
        return replace(answer, body=answer.body[skipped : skipped + count])


def check_repository_id(model: str) -> None:
    """Raise an error if a text is not a repository id.

    Raises:
        ModelNotFoundError: it has another form than `namespace/name`.
    """
    try:
        validate_repo_id(model)
    except HFValidationError as error:
        advice = advice_on_path(Path(model).expanduser()) or "check the spelling"
        raise ModelNotFoundError(
            f"{model!r} is neither a folder nor a repository id of the form namespace/name; {advice}"
        ) from error


def find_repository(
    model: str, revision: str | None = None, *, token: str | None, seconds: float, subject: str = _SUBJECT
) -> Repository:
    """Find a model on the Hub.

    Args:
        model: repository id, `namespace/name`.
        revision: branch, tag or commit; None is the main branch.
        token: the Hub's token; None uses that of this machine's user, if any.
        seconds: time limit for all requests about the repository, including this one.
        subject: name of the repository in messages.

    Raises:
        ModelNotFoundError: the repository or revision does not exist, or access is denied.
        HubUnavailableError: the Hub does not answer.
    """
    deadline = time.monotonic() + seconds
    with hub_errors(subject):
        validate_repo_id(model)
        url = f"{constants.ENDPOINT}/api/models/{model}"
        if revision is not None:
            url += f"/revision/{quote(revision, safe='')}"
        answer = _get(f"{url}?blobs=true", token=token, deadline=deadline, most=_MAX_LISTING_BYTES)
    try:
        listing = json.loads(answer.body)
        listed = {str(sibling["rfilename"]): _size(sibling.get("size")) for sibling in listing["siblings"]}
        commit = str(listing["sha"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise HubUnavailableError("what answers in place of the Hub is not the Hub; check the network") from error
    sizes = {name: size for name, size in listed.items() if not any(fnmatch(name, pattern) for pattern in IGNORED)}
    return Repository(model=model, commit=commit, sizes=sizes, token=token, deadline=deadline, subject=subject)


@contextmanager
def offline() -> Iterator[None]:
    """Make the Hub's client and libraries based on it work offline, in the whole process.

    Loading from a folder needs nothing from the Hub, but libraries have sent requests nevertheless.
    """
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def hub_errors(subject: str) -> Iterator[None]:
    """Convert exceptions of the Hub's client into errors of this library.

    Args:
        subject: name of the repository in messages.

    Raises:
        ModelNotFoundError: the repository or revision does not exist, or access is denied.
        HubUnavailableError: the Hub does not answer, or its answer is not valid.
    """
    try:
        yield
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{subject}: it is gated; accept its terms on the Hub and set HF_TOKEN to a token of that account"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{subject}: it has no such revision; check the branch, tag or commit") from error
    except LocalEntryNotFoundError as error:
        raise _unreachable(subject, error) from error
    except (RepositoryNotFoundError, EntryNotFoundError, HFValidationError) as error:
        raise ModelNotFoundError(
            f"{subject}: not on the Hub, or not to be read; check the spelling, or set HF_TOKEN for a private one"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _MAY_SUCCEED_LATER:
            raise HubUnavailableError(f"{subject}: the Hub answers with status {status}; try again later") from error
        raise ModelNotFoundError(
            f"{subject}: the Hub refuses to show it (status {status}); check the spelling and HF_TOKEN"
        ) from error
    except _GivenUpError as error:
        raise HubUnavailableError(f"{subject}: the Hub answers too slowly; try again later") from error
    except (OfflineModeIsEnabled, httpx2.HTTPError) as error:
        raise _unreachable(subject, error) from error


def _size(listed: object) -> int | None:
    return listed if isinstance(listed, int) and listed >= 0 else None


def _get(
    url: str, *, token: str | None, deadline: float, most: int, headers: Mapping[str, str] | None = None
) -> _Answer:
    """Send a single request, and read no more than needed and no longer than the deadline.

    The Hub's own client retries, waits without limit, and sends additional requests with information about itself.
    """
    sent = {"User-Agent": f"rocket-compress/{__version__}", "Accept-Encoding": "identity", **(headers or {})}
    token = token or get_token()
    if token is not None:
        sent["Authorization"] = f"Bearer {token}"
    body = bytearray()
    with get_session().stream("GET", url, headers=sent, timeout=_seconds_left(deadline)) as response:
        hf_raise_for_status(response)
        for chunk in response.iter_bytes():
            body += chunk
            _seconds_left(deadline)
            if len(body) >= most:
                break
    return _Answer(status=response.status_code, headers=response.headers, body=bytes(body))


def _seconds_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise _GivenUpError
    return left


def _unreachable(subject: str, error: Exception) -> HubUnavailableError:
    return HubUnavailableError(f"{subject}: the Hub cannot be reached ({type(error).__name__}); try again later")
