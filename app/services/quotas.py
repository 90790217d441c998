"""Quotas of tenants: those that the operator has set for a tenant, or the defaults in the settings.

`OverQuotaError` means that a request can never be accepted, `QuotaExceededError` that it may be accepted later.
"""

from dataclasses import fields

from sqlalchemy.orm import Session

from app.shared.errors import OverQuotaError, QuotaExceededError
from app.shared.repositories.jobs import count_active_jobs
from app.shared.repositories.tenants import Quotas, find_quotas, lock_tenant, sum_stored_bytes
from app.shared.requests import CalibrationRequest, EvaluationRequest
from app.shared.settings import Settings

# Upper bounds on the window length when the request leaves it open.
_CALIBRATION_WINDOW, _EVALUATION_WINDOW = 256, 1024
_WINDOWS = "tokens (samples x sequence_length)"


def find_limits(session: Session, settings: Settings, owner: str) -> Quotas:
    """Return the quotas that apply to a tenant; None for no limit."""
    own = find_quotas(session, owner)
    limits = {}
    for field in fields(Quotas):
        value = getattr(own, field.name)
        limits[field.name] = getattr(settings, f"max_{field.name}") if value is None else value
    return Quotas(**limits)


def check_job_slot(session: Session, settings: Settings, owner: str) -> None:
    """Raise an error if the job that this transaction has just created exceeds the quota, so that it is rolled back.

    Exact under concurrency: the tenant's row is locked, so the second of two transactions counts after the first has
    ended. Called after the job is created, or replays, which create no job, would be refused.

    Raises:
        QuotaExceededError: the tenant has as many active jobs, or stores as many bytes, as allowed.
        OverQuotaError: the tenant may have no jobs at all.
    """
    lock_tenant(session, owner)
    limits = find_limits(session, settings, owner)
    most = limits.active_jobs
    if most == 0:
        raise OverQuotaError("this tenant is not allowed to have jobs; ask the operator of this server")
    if most is not None and count_active_jobs(session, owner) > most:
        raise QuotaExceededError(
            f"this tenant may have at most {most} unfinished jobs; wait for one to finish, or cancel one"
        )
    check_room(session, limits, owner)


def check_room(session: Session, limits: Quotas, owner: str, *, size: int = 0) -> None:
    """Raise an error if a tenant would store more than its quota.

    Args:
        session: a transaction; it must have locked the tenant if `size` is to be exact under concurrency.
        limits: the tenant's quotas, see `find_limits`.
        owner: the tenant.
        size: bytes to be stored; 0 if not known yet.

    Raises:
        QuotaExceededError: there is room once something is deleted.
        OverQuotaError: the size exceeds all that the tenant may store.
    """
    most = limits.stored_bytes
    if most is None:
        return
    if size > most:
        raise OverQuotaError(f"this is larger than the {most} bytes that this tenant may store in total")
    stored = sum_stored_bytes(session, owner)
    if stored >= most or stored + size > most:
        raise QuotaExceededError(
            f"this tenant stores {stored} of {most} bytes; delete jobs or uploads, or wait for artifacts to expire"
        )


def check_calibration_tokens(limits: Quotas, calibration: CalibrationRequest) -> None:
    """Raise an error if a calibration exceeds the tenant's quota of tokens.

    Raises:
        OverQuotaError: it does.
    """
    _check_tokens(limits, _tokens_of(calibration), f"calibration {_WINDOWS}", "calibration.samples")


def check_healing_tokens(limits: Quotas, tokens: int | None) -> None:
    """Raise an error if healing exceeds the tenant's quota of calibration tokens.

    Raises:
        OverQuotaError: it does.
    """
    _check_tokens(limits, tokens or 0, "tokens to heal on", "options.heal_tokens")


def check_evaluation_tokens(limits: Quotas, evaluation: EvaluationRequest | None) -> None:
    """Raise an error if an evaluation exceeds the tenant's quota of calibration tokens.

    Raises:
        OverQuotaError: it does.
    """
    if evaluation is not None:
        _check_tokens(limits, _tokens_of(evaluation), f"evaluation {_WINDOWS}", "evaluate.samples")


def _tokens_of(text: CalibrationRequest | EvaluationRequest) -> int:
    usual = _CALIBRATION_WINDOW if isinstance(text, CalibrationRequest) else _EVALUATION_WINDOW
    return text.samples * (text.sequence_length or usual)


def _check_tokens(limits: Quotas, tokens: int, kind: str, param: str) -> None:
    most = limits.calibration_tokens
    if most is not None and tokens > most:
        raise OverQuotaError(f"{tokens} {kind} requested; at most {most} are allowed", param=param)
