"""How much a tenant may have: what the operator has set for it, else what the settings give to all.

What could never be honoured is refused for good (`OverQuotaError`), what may be honoured later for now
(`QuotaExceededError`).
"""

from dataclasses import fields

from sqlalchemy.orm import Session

from app.shared.errors import OverQuotaError, QuotaExceededError
from app.shared.repositories.jobs import count_active_jobs
from app.shared.repositories.tenants import Quotas, find_quotas, lock_tenant, sum_stored_bytes
from app.shared.requests import CalibrationRequest, EvaluationRequest
from app.shared.settings import Settings

# Of a window whose length is left to the worker, the longest that it can become.
_DEFAULT_WINDOW = 1024


def find_limits(session: Session, settings: Settings, owner: str) -> Quotas:
    """What applies to a tenant; None is no limit."""
    own = find_quotas(session, owner)
    limits = {}
    for field in fields(Quotas):
        chosen = getattr(own, field.name)
        limits[field.name] = getattr(settings, f"max_{field.name}") if chosen is None else chosen
    return Quotas(**limits)


def require_job_slot(session: Session, settings: Settings, owner: str) -> None:
    """Refuses a job that this transaction has just made, and so undoes it, if it is one too many.

    Exact however many are submitted at once: the tenant's row is locked, so that of two transactions one counts after
    the other has ended. Called once the job is there, or a replay would be refused where no job is made.

    Raises:
        QuotaExceededError: the tenant has as many active jobs, or stores as many bytes, as it may.
        OverQuotaError: the tenant may have no jobs at all.
    """
    lock_tenant(session, owner)
    limits = find_limits(session, settings, owner)
    most = limits.active_jobs
    if most == 0:
        raise OverQuotaError("this tenant may have no jobs; ask the operator of this server")
    if most is not None and count_active_jobs(session, owner) > most:
        raise QuotaExceededError(
            f"{most} jobs that have not ended are all that this tenant may have; wait for one to end, or cancel one"
        )
    require_room(session, limits, owner)


def require_room(session: Session, limits: Quotas, owner: str, *, size: int = 0) -> None:
    """Refuses to store more than a tenant may.

    Args:
        session: a transaction; one that has locked the tenant if `size` must be exact under concurrency.
        limits: of the tenant, see `find_limits`.
        owner: the tenant.
        size: of what shall be stored, in bytes; 0 if that is not known yet.

    Raises:
        QuotaExceededError: it fits once something is deleted.
        OverQuotaError: it is larger than all that the tenant may store.
    """
    most = limits.stored_bytes
    if most is None:
        return
    if size > most:
        raise OverQuotaError(f"this is larger than the {most} bytes that this tenant may store")
    stored = sum_stored_bytes(session, owner)
    if stored >= most or stored + size > most:
        raise QuotaExceededError(
            f"this tenant stores {stored} of {most} bytes; delete jobs or uploads, or wait for artifacts to expire"
        )


def require_calibration_tokens(limits: Quotas, calibration: CalibrationRequest) -> None:
    """Refuses to calibrate on more text than a tenant may.

    Raises:
        OverQuotaError: it is too much.
    """
    most = limits.calibration_tokens
    asked = calibration.samples * (calibration.sequence_length or _DEFAULT_WINDOW)
    if most is not None and asked > most:
        raise OverQuotaError(
            f"{asked} calibration tokens (samples x sequence_length) are asked for, {most} are allowed",
            param="calibration.samples",
        )


def require_evaluation_tokens(limits: Quotas, evaluation: EvaluationRequest | None) -> None:
    """Refuses to evaluate on more text than a tenant may calibrate on.

    Raises:
        OverQuotaError: it is too much.
    """
    if evaluation is None:
        return
    most = limits.calibration_tokens
    asked = evaluation.samples * (evaluation.sequence_length or _DEFAULT_WINDOW)
    if most is not None and asked > most:
        raise OverQuotaError(
            f"{asked} tokens to evaluate on (samples x sequence_length) are asked for, {most} are allowed",
            param="evaluate.samples",
        )
