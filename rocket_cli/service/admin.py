"""`rocket admin`: keys, tenants, quotas, sessions, audit log and stuck jobs, for operators of the service.

It accesses the database, not a server, so it must run where the service runs, with the same environment.
"""

import json
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rocket_cli import options
from rocket_cli.progress_view import print_line
from rocket_cli.service import admin_records
from rocket_cli.service.database import DataDir, Row, print_rows, text_of, transaction

if TYPE_CHECKING:
    from app.shared.models import ApiKey, Tenant


app = typer.Typer(
    help="Manage keys, tenants, quotas, sessions, the audit log and stuck jobs; runs where the service runs.",
    no_args_is_help=True,
)
_keys = typer.Typer(help="Create, list and revoke API keys.", no_args_is_help=True)
_quota = typer.Typer(help="Show and set the quotas of tenants.", no_args_is_help=True)
app.add_typer(_keys, name="keys")
app.add_typer(_quota, name="quota")
app.add_typer(admin_records.sessions_app, name="sessions")
app.command("audit")(admin_records.list_audit_events)


class ScopeChoice(StrEnum):
    """Scopes of an API key."""

    READ = "read"
    WRITE = "write"
    METRICS = "metrics"


_SETTINGS_QUOTA = "default"
_MAX_JOBS = 2**31 - 1
_MAX_BYTES = 2**63 - 1


def _parse_quota(text: str, most: int) -> int | str:
    if text == _SETTINGS_QUOTA:
        return text
    if not text.isascii() or not text.isdecimal() or int(text) > most:
        raise typer.BadParameter(
            f"is not a number from 0 to {most}, nor `{_SETTINGS_QUOTA}`, which is that of the settings"
        )
    return int(text)


def _quota_option(what: str, most: int = _MAX_BYTES) -> Any:
    return typer.Option(metavar="N", help=what, parser=lambda text: _parse_quota(str(text), most), show_default=False)


Tenant_ = Annotated[str, typer.Argument(metavar="TENANT", help="Name of the tenant.")]


@_keys.command("create")
def create_key(
    *,
    tenant: Tenant_,
    scope: Annotated[
        list[ScopeChoice] | None,
        typer.Option(metavar="SCOPE", help="read, write or metrics; repeatable.", show_default="read and write"),
    ] = None,
    label: Annotated[
        str, typer.Option(metavar="TEXT", help="Label that distinguishes it from the tenant's other keys.")
    ] = "",
    expires_days: Annotated[
        float | None,
        typer.Option(metavar="N", min=0, max=36500, help="Days until the key expires.", show_default="never"),
    ] = None,
    data_dir: DataDir = None,
    as_json: options.JsonResult = False,
) -> None:
    """Create and print an API key, and its tenant if necessary; the key cannot be shown again."""
    from app.shared.repositories import audit, keys

    lifetime = None if expires_days is None else timedelta(days=expires_days)
    with transaction(data_dir, as_json=as_json) as session:
        scopes = keys.DEFAULT_SCOPES if scope is None else tuple(scope)
        made = keys.create_key(session, tenant, scopes=scopes, label=label, lifetime=lifetime)
        actor = audit.ADMIN.on_behalf_of(tenant)
        audit.record(session, actor, audit.Action.KEY_CREATE, subject=made.row.id, detail={"scopes": made.row.scopes})
    # Printed only after the commit.
    if as_json:
        typer.echo(json.dumps({"key": made.text} | _key_fields(made.row), indent=2))
        return
    if made.is_new_tenant:
        print_line(f"{tenant} is a new tenant")
    print_line("this key is shown only once; send it as ROCKET_API_KEY, or `Authorization: Bearer KEY`")
    typer.echo(made.text)


@_keys.command("list")
def list_keys(
    *,
    tenant: Annotated[
        str | None, typer.Argument(metavar="TENANT", help="Only keys of this tenant.", show_default="all")
    ] = None,
    data_dir: DataDir = None,
    as_json: options.JsonResult = False,
) -> None:
    """List API keys, oldest first, including revoked and expired ones."""
    from app.shared.repositories import keys

    with transaction(data_dir, as_json=as_json) as session:
        rows = [_key_fields(row) for row in keys.list_keys(session, tenant)]
    print_rows(rows, as_json=as_json)


@_keys.command("revoke")
def revoke_key(
    *,
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the key: the part between its two underscores.")],
    data_dir: DataDir = None,
    as_json: options.JsonResult = False,
) -> None:
    """Revoke an API key immediately and permanently, with the keys that tenants have made with it."""
    from app.shared.repositories import audit, keys

    with transaction(data_dir, as_json=as_json) as session:
        key = keys.revoke_key(session, key_id)
        audit.record(session, audit.ADMIN.on_behalf_of(key.tenant), audit.Action.KEY_REVOKE, subject=key_id)
        revoked = _key_fields(key)
        is_last = not keys.has_usable_keys(session)
    if as_json:
        typer.echo(json.dumps(revoked, indent=2))
        return
    print_line(f"key {key_id} of {revoked['tenant']} is revoked")
    if is_last:
        print_line("no usable key is left: all requests are refused until `rocket admin keys create` makes one")


@app.command("tenants")
def list_tenants(*, data_dir: DataDir = None, as_json: options.JsonResult = False) -> None:
    """List tenants with their quotas."""
    from app.shared.repositories import tenants

    with transaction(data_dir, as_json=as_json) as session:
        rows = [_tenant_fields(row) for row in tenants.list_tenants(session)]
    print_rows(rows, as_json=as_json)


@_quota.command("set")
def set_quota(
    *,
    tenant: Tenant_,
    active_jobs: Annotated[str | None, _quota_option("Jobs that have not ended.", _MAX_JOBS)] = None,
    stored_bytes: Annotated[str | None, _quota_option("Bytes of artifacts and uploads.")] = None,
    model_bytes: Annotated[str | None, _quota_option("Bytes of the weights of one model.")] = None,
    calibration_tokens: Annotated[str | None, _quota_option("Calibration tokens of one job.")] = None,
    data_dir: DataDir = None,
    as_json: options.JsonResult = False,
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
    with transaction(data_dir, as_json=as_json) as session:
        row = _tenant_fields(tenants.set_quotas(session, tenant, **chosen))
        audit.record(session, audit.ADMIN.on_behalf_of(tenant), audit.Action.QUOTA_SET, detail=chosen)
    print_rows([row], as_json=as_json)


@app.command("requeue")
def requeue(*, job_id: options.JobId, data_dir: DataDir = None, as_json: options.JsonResult = False) -> None:
    """Requeue a running job whose worker hangs; the attempt counts, and the next one resumes from the checkpoints."""
    from app.shared.repositories import audit, sweeps

    with transaction(data_dir, as_json=as_json) as session:
        job = sweeps.requeue_job(session, job_id)
        status = job.status
        audit.record(session, audit.ADMIN.on_behalf_of(job.owner), audit.Action.JOB_REQUEUE, subject=job_id)
    if as_json:
        typer.echo(json.dumps({"id": job_id, "status": status}))
    else:
        print_line(f"{job_id} is {status}")


def _key_fields(row: "ApiKey") -> Row:
    return {
        "id": row.id,
        "tenant": row.tenant,
        "label": row.label,
        "scopes": row.scopes,
        "created_at": text_of(row.created_at),
        "expires_at": text_of(row.expires_at),
        "revoked_at": text_of(row.revoked_at),
        "last_used_at": text_of(row.last_used_at),
        "made_with": row.made_with,
    }


def _tenant_fields(row: "Tenant") -> Row:
    return {
        "tenant": row.name,
        "active_jobs": row.max_active_jobs,
        "stored_bytes": row.max_stored_bytes,
        "model_bytes": row.max_model_bytes,
        "calibration_tokens": row.max_calibration_tokens,
    }
