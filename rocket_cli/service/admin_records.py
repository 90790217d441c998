"""`rocket admin sessions` and `rocket admin audit`: sessions and the audit log."""

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from rocket_cli import options
from rocket_cli.progress_view import print_line
from rocket_cli.service.database import DataDir, Row, print_rows, text_of, transaction

if TYPE_CHECKING:
    from app.shared.models import AuditEvent

_MAX_EVENTS = 1_000_000

sessions_app = typer.Typer(help="List and revoke the sessions of users on the pages.", no_args_is_help=True)


def _parse_action(text: str) -> str:
    from app.shared.repositories.audit import Action

    if text not in set(Action):
        raise typer.BadParameter(f"is not an action of the audit log; use one of {', '.join(Action)}")
    return text


@sessions_app.command("list")
def list_sessions(
    *,
    tenant: Annotated[
        str | None, typer.Argument(metavar="TENANT", help="Only sessions of this tenant.", show_default="all")
    ] = None,
    data_dir: DataDir = None,
    as_json: options.JsonResult = False,
) -> None:
    """List sessions, oldest first."""
    from app.shared.repositories import sessions

    with transaction(data_dir, as_json=as_json) as session:
        rows: list[Row] = [
            {
                "id": row.id,
                "tenant": key.tenant,
                "key_id": row.key_id,
                "created_at": text_of(row.created_at),
                "expires_at": text_of(row.expires_at),
            }
            for row, key in sessions.list_sessions(session, tenant)
        ]
    print_rows(rows, as_json=as_json)


@sessions_app.command("revoke")
def revoke_session(
    *,
    session_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the session, as listed.")],
    data_dir: DataDir = None,
    as_json: options.JsonResult = False,
) -> None:
    """End a session immediately; its key can be used to sign in again until it is revoked."""
    from app.shared.repositories import audit, sessions

    with transaction(data_dir, as_json=as_json) as session:
        key = sessions.revoke_session(session, session_id)
        actor = audit.ADMIN.on_behalf_of(key.tenant)
        audit.record(session, actor, audit.Action.SESSION_REVOKE, subject=session_id, detail={"key_id": key.id})
        revoked = {"id": session_id, "tenant": key.tenant, "key_id": key.id}
    if as_json:
        typer.echo(json.dumps(revoked, indent=2))
    else:
        print_line(f"session {session_id} of {revoked['tenant']} has ended")


def list_audit_events(
    *,
    tenant: Annotated[
        str | None, typer.Option(metavar="TENANT", help="Only events of this tenant.", show_default="all")
    ] = None,
    action: Annotated[
        str | None,
        typer.Option(
            metavar="ACTION",
            help="Only this action, for example `job.delete`.",
            parser=lambda text: _parse_action(str(text)),
            show_default="all",
        ),
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(metavar="TIME", help="Only events since this time (UTC).", show_default="the beginning"),
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=_MAX_EVENTS, help="Maximum number of events.")] = 50,
    data_dir: DataDir = None,
    as_json: options.JsonResult = False,
) -> None:
    """Show the audit log, newest first."""
    from app.shared.repositories import audit

    start = None if since is None else since.replace(tzinfo=UTC)
    chosen = None if action is None else audit.Action(action)
    with transaction(data_dir, as_json=as_json) as session:
        events = audit.list_events(session, tenant=tenant, action=chosen, since=start, limit=limit)
    if as_json:
        typer.echo(
            json.dumps({"data": [_event_fields(event) | {"detail": event.detail} for event in events]}, indent=2)
        )
        return
    print_rows([_event_fields(event) | {"detail": _summary(event)} for event in events], as_json=False)


def _event_fields(event: "AuditEvent") -> Row:
    return {
        "id": event.id,
        "at": text_of(event.at),
        "tenant": event.tenant,
        "actor": event.actor,
        "address": event.address,
        "action": event.action,
        "subject": event.subject,
        "outcome": event.outcome,
        "request_id": event.request_id,
    }


def _summary(event: "AuditEvent") -> str:
    return " ".join(f"{name}={value}" for name, value in event.detail.items())
