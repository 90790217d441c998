"""Tenants, which own jobs, and their quotas."""

import re
from dataclasses import dataclass

from sqlalchemy import exists, func, select
from sqlalchemy.orm import Session

from app.shared.database import insert_if_new, now
from app.shared.errors import InvalidRequestError, NotFoundError
from app.shared.models import Artifact, Job, Tenant, Upload, UploadedModel

# Easy to type, to quote in a URL and to grep for; never needs escaping.
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Quotas:
    """Quotas of a tenant; None for no limit, or in a tenant's own row, for the default in the settings.

    Attributes:
        active_jobs: jobs that have not ended.
        stored_bytes: bytes of artifacts and uploads.
        model_bytes: bytes of one model's weights.
        calibration_tokens: calibration tokens of one job.
    """

    active_jobs: int | None = None
    stored_bytes: int | None = None
    model_bytes: int | None = None
    calibration_tokens: int | None = None


def ensure_tenant(session: Session, name: str) -> bool:
    """Create a tenant if no tenant has that name.

    Returns:
        Whether it is new.

    Raises:
        InvalidRequestError: the name is not valid.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            "a tenant's name has 1 to 64 lower-case letters, digits, dots, dashes and underscores, and begins with a "
            "letter or digit",
            param="tenant",
        )
    return insert_if_new(session, Tenant, name=name, created_at=now(session))


def lock_tenant(session: Session, name: str) -> None:
    """Lock a tenant: other transactions that lock it wait for the end of this one, and then read its result.

    On SQLite every writing transaction waits for the others anyway.
    """
    ensure_tenant(session, name)
    session.execute(select(Tenant.name).where(Tenant.name == name).with_for_update())


def list_tenants(session: Session) -> list[Tenant]:
    """Return all tenants, by name."""
    return list(session.scalars(select(Tenant).order_by(Tenant.name)))


def set_quotas(session: Session, name: str, **chosen: int | None) -> Tenant:
    """Set some quotas of a tenant.

    Args:
        session: a writing transaction.
        name: the tenant.
        chosen: quotas by their names in `Quotas`, each >= 0; None for the default in the settings.

    Raises:
        NotFoundError: the tenant does not exist.
    """
    tenant = session.get(Tenant, name)
    if tenant is None:
        raise NotFoundError("no tenant has this name; `rocket admin tenants` lists them")
    for quota, most in chosen.items():
        setattr(tenant, f"max_{quota}", most)
    session.flush()
    return tenant


def find_quotas(session: Session, name: str) -> Quotas:
    """Return the quotas that were set for a tenant; empty if the tenant does not exist."""
    tenant = session.get(Tenant, name)
    if tenant is None:
        return Quotas()
    return Quotas(
        active_jobs=tenant.max_active_jobs,
        stored_bytes=tenant.max_stored_bytes,
        model_bytes=tenant.max_model_bytes,
        calibration_tokens=tenant.max_calibration_tokens,
    )


def sum_stored_bytes(session: Session, name: str) -> int:
    """Return the bytes of a tenant's artifacts and uploads in the store; models count whole once they are announced."""
    artifacts = (
        select(func.coalesce(func.sum(Artifact.size), 0))
        .where(Artifact.storage_key.is_not(None))
        .where(exists().where(Job.id == Artifact.job_id, Job.owner == name))
    )
    uploads = select(func.coalesce(func.sum(Upload.size), 0)).where(Upload.owner == name)
    models = select(func.coalesce(func.sum(UploadedModel.size), 0)).where(UploadedModel.owner == name)
    # Postgres returns sums as decimals.
    return sum(int(session.execute(statement).scalar_one()) for statement in (artifacts, uploads, models))
