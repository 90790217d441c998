"""Profiles of models, identified by a hash of what they depend on, and their retention."""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Select, delete, exists, func, or_, select
from sqlalchemy.orm import Session

from app.shared.database import change_rows, insertion, now
from app.shared.errors import ProfileNotFoundError
from app.shared.models import Job, Profile
from app.shared.outcomes import NewEvent
from app.shared.repositories import audit
from app.shared.repositories.audit import Action, Actor
from app.shared.repositories.events import append_event
from app.shared.repositories.identifiers import new_id
from app.shared.repositories.leases import Lease, change, lock_leased_job
from app.shared.requests import JobRequest
from rocket_core.candidates import SizePoint

if TYPE_CHECKING:
    # Imports numpy, which the web side needs only for queries about a profile.
    from rocket_core.allocation.predictor import ModelProfile

PREFIX = "prof"
NOT_FOUND = (
    "no profile has this id, or it was deleted; GET /profiles lists yours, and a job with the same model, calibration "
    "and options recreates it"
)

_BATCH = 100


def save_profile(
    session: Session,
    lease: Lease,
    profile: "ModelProfile",
    frontier: Sequence[SizePoint],
    reachable_ratio: float,
    *,
    most: int,
) -> str:
    """Save the profile that a job has made, or reuse that of an earlier job of the tenant; store its id in the job.

    If the tenant has more than the maximum, the least recently used profiles are deleted.

    Args:
        session: a writing transaction.
        lease: the worker's lease.
        profile: the profile of all layers.
        frontier: its prediction at every ratio.
        reachable_ratio: the largest reachable ratio.
        most: maximum number of the tenant's profiles; exceeded only for profiles of jobs that have not ended.

    Returns:
        The profile's id.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = lock_leased_job(session, lease)
    at = now(session)
    request = JobRequest.model_validate(job.request)
    row = {
        "id": new_id(PREFIX, at),
        "owner": job.owner,
        "fingerprint": profile.fingerprint,
        "model_id": request.model_id,
        "calibration": request.calibration.model_dump(mode="json"),
        "options": request.options.model_dump(mode="json"),
        "layer_count": len(profile.layers),
        "reachable_ratio": reachable_ratio,
        "frontier": [point.model_dump(mode="json") for point in frontier],
        "body": profile.model_dump(mode="json"),
        "created_at": at,
        "used_at": at,
    }
    profile_id = _insert_or_use(session, row)
    if profile_id == row["id"]:
        worker = Actor(tenant=job.owner, name="worker", request_id=job.request_id)
        audit.record(session, worker, Action.PROFILE_CREATE, subject=profile_id, detail={"job_id": job.id})
    if job.profile_id is None:
        data = {"profile": profile_id}
        append_event(session, job.id, NewEvent(type="profile", message="all layers are profiled", data=data), at)
    change(session, lease, profile_id=profile_id)
    _make_room(session, job.owner, most)
    return profile_id


def get_profile(session: Session, profile_id: str, owner: str) -> Profile:
    """Return a profile of a tenant; its body and its frontier are loaded on access.

    Raises:
        ProfileNotFoundError: the profile does not exist, or belongs to another tenant.
    """
    profile = session.scalars(select(Profile).where(Profile.id == profile_id, Profile.owner == owner)).one_or_none()
    if profile is None:
        raise ProfileNotFoundError(NOT_FOUND)
    return profile


def list_profiles(session: Session, owner: str, *, after: str | None = None, limit: int = 20) -> list[Profile]:
    """Return the profiles of a tenant, newest first.

    Args:
        session: a transaction.
        owner: the tenant.
        after: id of the last profile already seen, which may have been deleted.
        limit: maximum number of profiles.
    """
    statement = select(Profile).where(Profile.owner == owner).order_by(Profile.id.desc()).limit(limit)
    if after is not None:
        statement = statement.where(Profile.id < after)
    return list(session.scalars(statement))


def list_profiles_of(session: Session, owner: str, model_id: str, *, limit: int = 50) -> list[Profile]:
    """Return the profiles of a tenant for one model, newest first."""
    mine = (Profile.owner == owner, Profile.model_id == model_id)
    return list(session.scalars(select(Profile).where(*mine).order_by(Profile.id.desc()).limit(limit)))


def delete_profile(session: Session, profile_id: str, owner: str) -> None:
    """Delete a profile; the jobs that made or used it remain.

    Raises:
        ProfileNotFoundError: the profile does not exist, or belongs to another tenant.
    """
    profile = get_profile(session, profile_id, owner)
    session.execute(delete(Profile).where(Profile.id == profile.id))


def delete_unused(session: Session, *, retention: timedelta, limit: int = _BATCH) -> int:
    """Delete profiles that no job has made, used or ended with for the retention time; those of active jobs remain.

    Returns:
        Number of deleted profiles; 0 once none are left.
    """
    since = now(session) - retention
    old = select(Profile.id).where(Profile.used_at <= since).limit(limit)
    return _delete_unless_named(session, old, or_(Job.finished_at.is_(None), Job.finished_at > since))


def _insert_or_use(session: Session, row: dict[str, Any]) -> str:
    """Insert a profile, or mark that of the same owner and fingerprint as used, and return its id.

    In one statement: between two, another transaction could delete the profile that was found.
    """
    statement = (
        insertion(session, Profile)
        .values(row)
        .on_conflict_do_update(index_elements=["owner", "fingerprint"], set_={"used_at": row["used_at"]})
        .returning(Profile.id)
    )
    return session.execute(statement).scalar_one()


def _make_room(session: Session, owner: str, most: int) -> None:
    mine = Profile.owner == owner
    surplus = session.execute(select(func.count()).select_from(Profile).where(mine)).scalar_one() - most
    if surplus > 0:
        oldest = select(Profile.id).where(mine).order_by(Profile.used_at, Profile.id)
        _delete_unless_named(session, oldest.limit(min(surplus, _BATCH)), Job.finished_at.is_(None))


def _delete_unless_named(session: Session, choice: Select[str], by: ColumnElement[bool]) -> int:
    """Delete the selected profiles that are not referred to by certain jobs, and return their number.

    A job stores the id of a profile in the transaction that marks it as used (`save_profile`). While such a transaction
    is open, it holds the row, which is skipped; whether another one has committed in between is checked with the rows
    locked.
    """
    is_free = ~exists().where(Job.profile_id == Profile.id, by)
    ids = session.scalars(choice.where(is_free).with_for_update(skip_locked=True)).all()
    return change_rows(session, delete(Profile).where(Profile.id.in_(ids), is_free))
