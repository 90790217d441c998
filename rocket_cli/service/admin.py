"""`rocket admin`: keys, tenants, quotas, sessions, audit log and stuck jobs, for operators of the service.

It accesses the database, not a server, so it must run where the service runs, with the same environment.
"""

import json
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rocket_cli import options
from rocket_cli.option_groups import CommandGroup
from rocket_cli.progress_view import print_line
from rocket_cli.service.database import Row, ServiceDatabase, fields_of

if TYPE_CHECKING:
    from app.shared.models import ApiKey, AuditEvent, Tenant


app = CommandGroup(
    help="Manage keys, tenants, quotas, sessions, the audit log and stuck jobs; runs where the service runs.",
    no_args_is_help=True,
)
_keys = CommandGroup(help="Create, list and revoke API keys.", no_args_is_help=True)
_quota = CommandGroup(help="Show and set the quotas of tenants.", no_args_is_help=True)
_sessions = CommandGroup(help="List and revoke the sessions of users on the pages.", no_args_is_help=True)
app.add_typer(_keys, name="keys")
app.add_typer(_quota, name="quota")
app.add_typer(_sessions, name="sessions")


class ScopeChoice(StrEnum):
    """Scopes of an API key."""

    READ = "read"
    WRITE = "write"
    METRICS = "metrics"


_SETTINGS_QUOTA = "default"
_MAX_JOBS = 2**31 - 1
_MAX_BYTES = 2**63 - 1
_MAX_EVENTS = 1_000_000


def _parse_quota(most: int, given: object) -> int | str:
    text = str(given)
    if text == _SETTINGS_QUOTA:
        return text
    if not text.isascii() or not text.isdecimal() or int(text) > most:
        raise typer.BadParameter(
            f"is not a number from 0 to {most}, nor `{_SETTINGS_QUOTA}`, which is that of the settings"
        )
    return int(text)


def _quota_option(what: str, most: int = _MAX_BYTES) -> Any:
    return options.option("N", what, shown=False, parser=partial(_parse_quota, most))


def _parse_action(given: object) -> str:
    from app.shared.repositories.audit import Action

    text = str(given)
    if text not in set(Action):
        raise typer.BadParameter(f"is not an action of the audit log; use one of {', '.join(Action)}")
    return text


_Tenant = Annotated[str, options.argument("TENANT", "Name of the tenant.")]


@_keys.command("create")
def create_key(
    *,
    tenant: _Tenant,
    scope: Annotated[
        list[ScopeChoice] | None, options.option("SCOPE", "read, write or metrics; repeatable.", "read and write")
    ] = None,
    label: Annotated[str, options.option("TEXT", "Label that distinguishes it from the tenant's other keys.")] = "",
    expires_days: Annotated[
        float | None, options.option("N", "Days until the key expires.", "never", min=0, max=36500)
    ] = None,
    database: ServiceDatabase,
) -> None:
    """Create and print an API key, and its tenant if necessary; the key cannot be shown again."""
    from app.shared.repositories import audit, keys

    lifetime = None if expires_days is None else timedelta(days=expires_days)
    with database.transaction() as session:
        scopes = keys.DEFAULT_SCOPES if scope is None else tuple(scope)
        made = keys.create_key(session, tenant, scopes=scopes, label=label, lifetime=lifetime)
        actor = audit.ADMIN.on_behalf_of(tenant)
        audit.record(session, actor, audit.Action.KEY_CREATE, subject=made.row.id, detail={"scopes": made.row.scopes})
    # Printed only after the commit.
    if database.as_json:
        typer.echo(json.dumps({"key": made.text} | _key_fields(made.row), indent=2))
        return
    if made.is_new_tenant:
        print_line(f"{tenant} is a new tenant")
    print_line("this key is shown only once; send it as ROCKET_API_KEY, or `Authorization: Bearer KEY`")
    typer.echo(made.text)


@_keys.command("list")
def list_keys(
    *,
    tenant: Annotated[str | None, options.argument("TENANT", "Only keys of this tenant.", "all")] = None,
    database: ServiceDatabase,
) -> None:
    """List API keys, oldest first, including revoked and expired ones."""
    from app.shared.repositories import keys

    with database.transaction() as session:
        rows = [_key_fields(row) for row in keys.list_keys(session, tenant)]
    database.print_rows(rows)


@_keys.command("revoke")
def revoke_key(
    *,
    key_id: Annotated[str, options.argument("ID", "Id of the key: the part between its two underscores.")],
    database: ServiceDatabase,
) -> None:
    """Revoke an API key immediately and permanently, with the keys that tenants have made with it."""
    from app.shared.repositories import audit, keys

    with database.transaction() as session:
        key = keys.revoke_key(session, key_id)
        audit.record(session, audit.ADMIN.on_behalf_of(key.tenant), audit.Action.KEY_REVOKE, subject=key_id)
        revoked = _key_fields(key)
        is_last = not keys.has_usable_keys(session)
    lines = [f"key {key_id} of {revoked['tenant']} is revoked"]
    if is_last:
        lines.append("no usable key is left: all requests are refused until `rocket admin keys create` makes one")
    database.print_outcome(revoked, *lines)


@app.command("audit")
def list_audit_events(
    *,
    tenant: Annotated[str | None, options.option("TENANT", "Only events of this tenant.", "all")] = None,
    action: Annotated[
        str | None, options.option("ACTION", "Only this action, for example `job.delete`.", "all", parser=_parse_action)
    ] = None,
    since: Annotated[
        datetime | None, options.option("TIME", "Only events since this time (UTC).", "the beginning")
    ] = None,
    limit: Annotated[int, options.option("N", "Maximum number of events.", min=1, max=_MAX_EVENTS)] = 50,
    database: ServiceDatabase,
) -> None:
    """Show the audit log, newest first."""
    from app.shared.repositories import audit

    start = None if since is None else since.replace(tzinfo=UTC)
    chosen = None if action is None else audit.Action(action)
    with database.transaction() as session:
        events = audit.list_events(session, tenant=tenant, action=chosen, since=start, limit=limit)
    database.print_rows([_event_fields(event, as_text=not database.as_json) for event in events])


@app.command("tenants")
def list_tenants(*, database: ServiceDatabase) -> None:
    """List tenants with their quotas."""
    from app.shared.repositories import tenants

    with database.transaction() as session:
        rows = [_tenant_fields(row) for row in tenants.list_tenants(session)]
    database.print_rows(rows)


@_quota.command("set")
def set_quota(
    *,
    tenant: _Tenant,
    active_jobs: Annotated[str | None, _quota_option("Jobs that have not ended.", _MAX_JOBS)] = None,
    stored_bytes: Annotated[str | None, _quota_option("Bytes of artifacts and uploads.")] = None,
    model_bytes: Annotated[str | None, _quota_option("Bytes of the weights of one model.")] = None,
    calibration_tokens: Annotated[str | None, _quota_option("Calibration tokens of one job.")] = None,
    database: ServiceDatabase,
) -> None:
    """Set quotas of a tenant: a number, or `default` for the quota from the settings; other quotas stay unchanged."""
    from app.shared.repositories import audit, tenants

    quotas = {
        "active_jobs": active_jobs,
        "stored_bytes": stored_bytes,
        "model_bytes": model_bytes,
        "calibration_tokens": calibration_tokens,
    }
    chosen = {name: None if most == _SETTINGS_QUOTA else int(most) for name, most in quotas.items() if most is not None}
    with database.transaction() as session:
        row = _tenant_fields(tenants.set_quotas(session, tenant, **chosen))
        audit.record(session, audit.ADMIN.on_behalf_of(tenant), audit.Action.QUOTA_SET, detail=chosen)
    database.print_rows([row])


@_sessions.command("list")
def list_sessions(
    *,
    tenant: Annotated[str | None, options.argument("TENANT", "Only sessions of this tenant.", "all")] = None,
    database: ServiceDatabase,
) -> None:
    """List sessions, oldest first."""
    from app.shared.repositories import sessions

    with database.transaction() as session:
        rows = [
            fields_of(row, "id") | fields_of(key, "tenant") | fields_of(row, "key_id", "created_at", "expires_at")
            for row, key in sessions.list_sessions(session, tenant)
        ]
    database.print_rows(rows)


@_sessions.command("revoke")
def revoke_session(
    *, session_id: Annotated[str, options.argument("ID", "Id of the session, as listed.")], database: ServiceDatabase
) -> None:
    """End a session immediately; its key can be used to sign in again until it is revoked."""
    from app.shared.repositories import audit, sessions

    with database.transaction() as session:
        key = sessions.revoke_session(session, session_id)
        actor = audit.ADMIN.on_behalf_of(key.tenant)
        audit.record(session, actor, audit.Action.SESSION_REVOKE, subject=session_id, detail={"key_id": key.id})
        revoked: Row = {"id": session_id, "tenant": key.tenant, "key_id": key.id}
    database.print_outcome(revoked, f"session {session_id} of {revoked['tenant']} has ended")


@app.command("requeue")
def requeue(*, job_id: options.JobId, database: ServiceDatabase) -> None:
    """Requeue a running job whose worker hangs; the attempt counts, and the next one resumes from the checkpoints."""
    from app.shared.repositories import audit, sweeps

    with database.transaction() as session:
        job = sweeps.requeue_job(session, job_id)
        status = job.status
        audit.record(session, audit.ADMIN.on_behalf_of(job.owner), audit.Action.JOB_REQUEUE, subject=job_id)
    if database.as_json:
        typer.echo(json.dumps({"id": job_id, "status": status}))
    else:
        print_line(f"{job_id} is {status}")


def _key_fields(row: "ApiKey") -> Row:
    named = fields_of(row, "id", "tenant", "label", "scopes")
    return named | fields_of(row, "created_at", "expires_at", "revoked_at", "last_used_at", "made_with")


def _tenant_fields(row: "Tenant") -> Row:
    return {
        "tenant": row.name,
        "active_jobs": row.max_active_jobs,
        "stored_bytes": row.max_stored_bytes,
        "model_bytes": row.max_model_bytes,
        "calibration_tokens": row.max_calibration_tokens,
    }


def _event_fields(event: "AuditEvent", *, as_text: bool) -> Row:
    fields = fields_of(
        event, "id", "at", "tenant", "actor", "address", "action", "subject", "outcome", "request_id", "detail"
    )
    summary = " ".join(f"{name}={value}" for name, value in event.detail.items())
    return fields | {"detail": summary} if as_text else fields
