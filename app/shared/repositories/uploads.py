"""Calibration files that tenants have uploaded, identified by their content."""

from dataclasses import dataclass

from sqlalchemy import delete, func, or_, select
from sqlalchemy.orm import Session

from app.shared.database import insert_if_new, now
from app.shared.errors import ConflictError, UploadNotFoundError
from app.shared.lifecycle import Status
from app.shared.models import Job, Upload
from app.shared.requests import UPLOAD

_ID_DIGITS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class NewUpload:
    """A checked and stored file.

    Attributes:
        storage_key: its key in the store.
        sha256: hash of its content, hexadecimal.
        size: size in bytes.
        suffix: how it is read, `.jsonl` or `.txt`.
        documents: number of documents.
        name: name of the file; None if the client did not send it.
    """

    storage_key: str
    sha256: str
    size: int
    suffix: str
    documents: int
    name: str | None = None

    @property
    def id(self) -> str:
        """The id under which its owner finds it."""
        return self.sha256[:_ID_DIGITS]


def save_upload(session: Session, owner: str, new: NewUpload) -> tuple[Upload, bool]:
    """Save a file, or return the tenant's earlier upload of the same content.

    Returns:
        The upload, and whether it is new; if not, the caller must remove the stored file.
    """
    values = {name: getattr(new, name) for name in ("storage_key", "sha256", "size", "suffix", "documents", "name")}
    is_new = insert_if_new(session, Upload, owner=owner, id=new.id, created_at=now(session), **values)
    return get_upload(session, owner, new.id), is_new


def is_uploaded(session: Session, owner: str, upload_id: str) -> bool:
    """Return whether a tenant has a file with that id."""
    return session.get(Upload, (owner, upload_id)) is not None


def get_upload(session: Session, owner: str, upload_id: str) -> Upload:
    """Return a file of a tenant.

    Raises:
        UploadNotFoundError: the file does not exist, or belongs to another tenant.
    """
    upload = session.get(Upload, (owner, upload_id))
    if upload is None:
        raise UploadNotFoundError("no uploaded file has this id; GET /calibrations lists yours")
    return upload


def list_uploads(session: Session, owner: str) -> list[Upload]:
    """Return all files of a tenant, oldest first."""
    return list(session.scalars(select(Upload).where(Upload.owner == owner).order_by(Upload.created_at, Upload.id)))


def count_uploads(session: Session, owner: str) -> int:
    """Return the number of a tenant's files."""
    return session.execute(select(func.count()).select_from(Upload).where(Upload.owner == owner)).scalar_one()


def check_upload(session: Session, owner: str, upload_id: str) -> None:
    """Raise an error unless a file exists, and lock it while this transaction creates a job that needs it.

    Raises:
        UploadNotFoundError: the file does not exist, or belongs to another tenant.
    """
    mine = select(Upload.id).where(Upload.owner == owner, Upload.id == upload_id)
    if session.execute(mine.with_for_update(read=True)).one_or_none() is None:
        get_upload(session, owner, upload_id)


def delete_upload(session: Session, owner: str, upload_id: str) -> str:
    """Delete the row of a file.

    Returns:
        Its storage key, to be removed once the transaction is committed.

    Raises:
        UploadNotFoundError: the file does not exist, or belongs to another tenant.
        ConflictError: an unfinished job needs it.
    """
    mine = (Upload.owner == owner, Upload.id == upload_id)
    key = session.execute(select(Upload.storage_key).where(*mine).with_for_update()).scalar_one_or_none()
    if key is None:
        get_upload(session, owner, upload_id)
    active = [status for status in Status if not status.is_terminal]
    needed = select(Job.id).where(
        Job.owner == owner,
        Job.status.in_(active),
        or_(*(Job.request[part]["dataset"].as_string() == UPLOAD + upload_id for part in ("calibration", "evaluate"))),
    )
    if session.execute(needed.limit(1)).first() is not None:
        raise ConflictError("an unfinished job uses this file; cancel the job, or wait until it finishes")
    session.execute(delete(Upload).where(*mine))
    return str(key)
