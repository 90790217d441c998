"""Calibration files of tenants: checked while they arrive, stored by content."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy.orm import Session

from app.services import quotas
from app.services.context import Context
from app.shared import catalog
from app.shared.errors import QuotaExceededError
from app.shared.models import Upload
from app.shared.repositories import audit, tenants, uploads
from app.shared.repositories.audit import Action, Actor
from app.shared.repositories.removed import Removed
from app.shared.repositories.uploads import NewUpload
from app.shared.requests import UPLOAD
from rocket_core.errors import CalibrationError, EmptyCalibrationError
from rocket_core.inspection.files.text_rows import Chat, Row, row_document

# A document is tokenized as a whole.
_MAX_LINE_BYTES = 2**20 * 8
# Upper bound on the characters of a line's JSON outside strings, including quotes. They are parsed under the
# interpreter's lock, several hundred times slower than text.
_MAX_STRUCTURE = 2**18
_SURROGATE = re.compile("[\ud800-\udfff]")


class DocumentCheck:
    """Check of a calibration file as it arrives, by the rules of `rocket_core.calibration.datasets`.

    Args:
        suffix: `.txt` for plain text, or `.jsonl` for an object with a string `text` or a chat on each line.

    Attributes:
        documents: number of documents so far.
    """

    def __init__(self, suffix: str) -> None:
        self.documents = 0
        self._is_text = suffix == ".txt"
        self._rest = b""
        self._line = 0

    def passing(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the same bytes, checked.

        Raises:
            CalibrationError: the file is not valid; the message names the line, without quoting it.
            EmptyCalibrationError: the file contains no text.
        """
        for chunk in chunks:
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                self._check(line)
            if len(self._rest) > _MAX_LINE_BYTES:
                raise self._fault(f"is longer than {_MAX_LINE_BYTES} bytes", ahead=1)
            yield chunk
        self._check(self._rest)
        if self.documents == 0:
            raise EmptyCalibrationError("the file contains no text; upload one with at least one document")

    def _check(self, line: bytes) -> None:
        self._line += 1
        if len(line) > _MAX_LINE_BYTES:
            raise self._fault(f"is longer than {_MAX_LINE_BYTES} bytes")
        if b"\0" in line:
            raise self._fault("contains a NUL character and is not text")
        try:
            text = line.decode("utf-8-sig" if self._line == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise self._fault("is not UTF-8; convert the file") from error
        if not text.strip():
            return
        # A text file is one document, however many lines it has.
        self.documents = 1 if self._is_text else self.documents + 1
        if not self._is_text:
            self._check_document(text)

    def _check_document(self, line: str) -> None:
        self._check_structure(line)
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._fault('is not valid JSON; each line must be like {"text": "..."}') from error
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(record, dict):
            raise self._fault('is not a JSON object; each line must be like {"text": "..."}')
        if not isinstance(text, str):
            text = self._chat(line, record)
        if record.get("image") is not None:
            raise self._fault(
                'names an image, and an upload holds no images; remove "image", or ask the operator to put the file '
                "with its images into the datasets folder"
            )
        if "\0" in text or _SURROGATE.search(text):
            raise self._fault('contains a NUL character or an unpaired surrogate in "text"; remove it')

    def _chat(self, line: str, record: Mapping[str, Any]) -> str:
        """Check an object without a text, and return the content of its chat."""
        if len(line) > _MAX_STRUCTURE:
            # Strings in a chat may be JSON themselves, which is parsed under the interpreter's lock.
            raise self._fault(f'has no string "text"; chats may have {_MAX_STRUCTURE} characters')
        try:
            found = row_document(Row(where="", fields=record))
        except CalibrationError as error:
            raise self._fault(
                'has no string "text" and no chat; `rocket upload --calibration-column NAME` takes another column'
            ) from error
        assert isinstance(found, Chat), "a text is not a chat"
        if "\\u0000" in found.content:
            raise self._fault("contains a NUL character and is not text; remove it")
        return found.content

    def _check_structure(self, line: str) -> None:
        if len(line) <= _MAX_STRUCTURE:
            return
        # The remaining quotes are those that start and end strings.
        plain = line.replace("\\\\", "").replace('\\"', "")
        quotes = plain.count('"')
        if quotes > _MAX_STRUCTURE or quotes + sum(map(len, plain.split('"')[::2])) > _MAX_STRUCTURE:
            raise self._fault(f"has more than {_MAX_STRUCTURE} characters that are not text; keep only the text")

    def _fault(self, what: str, *, ahead: int = 0) -> CalibrationError:
        return CalibrationError(f"line {self._line + ahead} {what}")


def save_upload(
    context: Context, actor: Actor, suffix: str, chunks: Iterable[bytes], *, name: str | None = None
) -> tuple[Upload, bool]:
    """Store a calibration file, or return the tenant's earlier upload of the same content.

    Args:
        context: the service.
        actor: who uploads it.
        suffix: `.txt` or `.jsonl`.
        chunks: the file as it arrives.
        name: name of the file, to show it; of a content that was uploaded before, the earlier name remains.

    Returns:
        The upload, and whether it is new.

    Raises:
        CalibrationError: the file cannot be used.
        OverQuotaError: the file is larger than an upload may be.
        QuotaExceededError: the tenant has as many files as allowed.
        StorageError: the file cannot be stored.
    """
    owner = actor.tenant
    check = DocumentCheck(suffix)
    stored = context.artifacts.put_stream(check.passing(chunks), max_bytes=context.settings.max_upload_bytes)
    new = NewUpload(
        storage_key=stored.key,
        sha256=stored.sha256,
        size=stored.size,
        suffix=suffix,
        documents=check.documents,
        name=name,
    )
    is_kept = False
    try:
        with context.database.transaction() as session:
            # The lock makes concurrent uploads count each other.
            tenants.lock_tenant(session, owner)
            if not uploads.is_uploaded(session, owner, new.id):
                _check_room(context, session, owner, new.size)
            upload, is_new = uploads.save_upload(session, owner, new)
            if is_new:
                audit.record(session, actor, Action.UPLOAD_CREATE, subject=upload.id, detail={"size": new.size})
        is_kept = is_new
        return upload, is_new
    finally:
        if not is_kept:
            context.remove(Removed(storage_keys=(stored.key,)))


def _check_room(context: Context, session: Session, owner: str, size: int) -> None:
    quotas.check_room(session, quotas.find_limits(session, context.settings, owner), owner, size=size)
    if uploads.count_uploads(session, owner) >= context.settings.max_uploads:
        raise QuotaExceededError(
            f"a tenant may have at most {context.settings.max_uploads} uploaded files; delete one first"
        )


def list_uploads(context: Context, owner: str) -> Sequence[Upload]:
    """Return all files of a tenant, oldest first."""
    with context.database.snapshot() as session:
        return uploads.list_uploads(session, owner)


def list_datasets(context: Context, owner: str) -> dict[str, str]:
    """Return all datasets that a tenant can use, the server's first, each with how a page shows it."""
    own = {UPLOAD + upload.id: upload.name or UPLOAD + upload.id for upload in list_uploads(context, owner)}
    return {name: name for name in catalog.list_calibrations(context.settings)} | own


def get_upload(context: Context, owner: str, upload_id: str) -> Upload:
    """Return a file of a tenant.

    Raises:
        UploadNotFoundError: the file does not exist, or belongs to another tenant.
    """
    with context.database.snapshot() as session:
        return uploads.get_upload(session, owner, upload_id)


def delete_upload(context: Context, actor: Actor, upload_id: str) -> None:
    """Delete a file of a tenant.

    Raises:
        UploadNotFoundError: the file does not exist, or belongs to another tenant.
        ConflictError: an unfinished job needs it.
    """
    with context.database.transaction() as session:
        key = uploads.delete_upload(session, actor.tenant, upload_id)
        audit.record(session, actor, Action.UPLOAD_DELETE, subject=upload_id)
    context.remove(Removed(storage_keys=(key,)))


def check_dataset(context: Context, owner: str, dataset: str) -> None:
    """Refuse an uploaded dataset that is not the tenant's; other datasets are not checked here.

    Raises:
        UploadNotFoundError: the tenant has not uploaded such a file.
    """
    if dataset.startswith(UPLOAD):
        get_upload(context, owner, dataset.removeprefix(UPLOAD))
