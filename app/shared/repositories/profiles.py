"""Profiles of models, each known by what it depends on."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sqlalchemy import delete, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from app.shared.database import now
from app.shared.errors import ProfileNotFoundError
from app.shared.models import Profile
from app.shared.outcomes import NewEvent
from app.shared.repositories.events import append_event
from app.shared.repositories.identifiers import new_id
from app.shared.repositories.leases import Lease, change, hold
from app.shared.requests import JobRequest
from rocket_core.candidates import SizePoint

if TYPE_CHECKING:
    # Brings numpy, which the web side needs only once it is asked about a profile.
    from rocket_core.model_profile import ModelProfile

PREFIX = "prof"


def save_profile(
    session: Session, lease: Lease, profile: "ModelProfile", frontier: Sequence[SizePoint], reachable_ratio: float
) -> str:
    """Keeps what a job has profiled, or finds that which an earlier job of the tenant has kept; names it in the job.

    Args:
        session: a writing transaction.
        lease: the worker's.
        profile: all layers.
        frontier: what it predicts at every ratio.
        reachable_ratio: the largest of them.

    Returns:
        The profile's id.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = hold(session, lease)
    at = now(session)
    request = JobRequest.model_validate(job.request)
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    statement = (
        insert(Profile)
        .values(
            id=new_id(PREFIX, at),
            owner=job.owner,
            fingerprint=profile.fingerprint,
            model_id=request.model_id,
            calibration=request.calibration.model_dump(mode="json"),
            options=request.options.model_dump(mode="json"),
            layer_count=len(profile.layers),
            reachable_ratio=reachable_ratio,
            frontier=[point.model_dump(mode="json") for point in frontier],
            body=profile.model_dump(mode="json"),
            created_at=at,
            used_at=at,
        )
        .on_conflict_do_nothing(index_elements=["owner", "fingerprint"])
    )
    session.execute(statement)
    mine = (Profile.owner == job.owner, Profile.fingerprint == profile.fingerprint)
    session.execute(update(Profile).where(*mine).values(used_at=at), execution_options={"synchronize_session": False})
    profile_id = session.execute(select(Profile.id).where(*mine)).scalar_one()
    if job.profile_id is None:
        data = {"profile": profile_id}
        append_event(session, job.id, NewEvent(type="profile", message="all layers are profiled", data=data), at)
    change(session, lease, profile_id=profile_id)
    return profile_id


def get_profile(session: Session, profile_id: str, owner: str) -> Profile:
    """One profile of a tenant, without its body and its frontier until they are asked for.

    Raises:
        ProfileNotFoundError: there is none, or it is somebody else's.
    """
    found = session.scalars(select(Profile).where(Profile.id == profile_id, Profile.owner == owner)).one_or_none()
    if found is None:
        raise ProfileNotFoundError("there is no profile of this id; GET /profiles lists yours")
    return found


def list_profiles(session: Session, owner: str, *, after: str | None = None, limit: int = 20) -> list[Profile]:
    """Profiles of a tenant, newest first.

    Args:
        session: a transaction.
        owner: the tenant.
        after: id of the last one already seen; it need not exist any more.
        limit: how many at most.
    """
    statement = select(Profile).where(Profile.owner == owner).order_by(Profile.id.desc()).limit(limit)
    if after is not None:
        statement = statement.where(Profile.id < after)
    return list(session.scalars(statement))


def list_profiles_of(session: Session, owner: str, model_id: str, *, limit: int = 50) -> list[Profile]:
    """Profiles of a tenant for one model, newest first."""
    mine = (Profile.owner == owner, Profile.model_id == model_id)
    return list(session.scalars(select(Profile).where(*mine).order_by(Profile.id.desc()).limit(limit)))


def delete_profile(session: Session, profile_id: str, owner: str) -> None:
    """Deletes a profile; jobs that it was made for or used by stay.

    Raises:
        ProfileNotFoundError: there is none, or it is somebody else's.
    """
    found = get_profile(session, profile_id, owner)
    session.execute(delete(Profile).where(Profile.id == found.id), execution_options={"synchronize_session": False})
