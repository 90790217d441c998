"""`rocket jobs`, `rocket report`, `rocket cancel` and `rocket retry`."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import typer
from rich.table import Table

from rocket_cli import options
from rocket_cli.connection import Connection, hub_token
from rocket_cli.following import follow_job
from rocket_cli.job_target import target_text
from rocket_cli.progress_view import print_line
from rocket_cli.report_table import print_report, text_table, wide_console
from rocket_client.models import Job
from rocket_core.config import stage_label
from rocket_core.report.formatting import age_text, bytes_text, progress_text


def jobs(
    *, status: options.Status = None, limit: options.JobLimit = 20, after: options.After = None, connection: Connection
) -> None:
    """List jobs, newest first."""
    with connection.client() as rocket:
        # One extra job shows whether there are more.
        listed = list(islice(rocket.iterate_jobs(status=status, after=after), limit + 1))
    shown, has_more = listed[:limit], len(listed) > limit
    if connection.as_json:
        typer.echo(json.dumps({"data": [job.model_dump(mode="json") for job in shown], "has_more": has_more}, indent=2))
        return
    if not shown:
        print_line(f"no {status or ''} jobs".replace("  ", " "))
        return
    wide_console().print(_table(shown, datetime.now(UTC)))
    if has_more:
        filters = () if status is None else ("--status", status)
        print_line(f"older ones: {connection.command('jobs', *filters, '--after', shown[-1].id)}")


def report(*, job_id: options.JobId, connection: Connection) -> None:
    """Show the report of a job that has succeeded, layer by layer."""
    with connection.client(job_id) as rocket:
        result = rocket.report(job_id)
    if connection.as_json:
        typer.echo(result.model_dump_json(indent=2))
    else:
        print_report(
            result,
            Path(job_id),
            fetched_by=connection.command("download", job_id),
            exported_by=connection.command("export-job", job_id, "--to", "dense"),
        )


def cancel(*, job_id: options.JobId, wait: options.Wait = False, connection: Connection) -> None:
    """Cancel a job, and keep its finished layers for a retry."""
    with connection.client(job_id) as rocket:
        job = rocket.cancel(job_id)
        connection.notice.end()
        if wait:
            job = follow_job(rocket, job, connection)
    if connection.as_json:
        typer.echo(job.model_dump_json(indent=2))
    elif job.has_ended:
        print_line(f"{job.id} is {job.status}; `{connection.command('retry', job.id)}` resumes from its checkpoints")
    else:
        print_line(
            f"{job.id} stops as soon as its worker notices; `{connection.command('watch', job.id)}` waits for that"
        )


def retry(*, job_id: options.JobId, hub_token_env: options.HubTokenVariable = None, connection: Connection) -> None:
    """Retry a job that failed or was cancelled, and print the new job's id."""
    token = hub_token(hub_token_env)
    with connection.client(job_id) as rocket:
        job = rocket.retry(job_id, hub_token=token)
    if connection.as_json:
        typer.echo(job.model_dump_json(indent=2))
        return
    typer.echo(job.id)
    print_line(f"resumes from the checkpoints of {job_id}; `{connection.command('watch', job.id)}` shows its progress")


def _table(rows: Sequence[Job], now: datetime) -> Table:
    columns = ("job", "status", "progress", "model", "target", "size", "quality", "age")
    ages = (age_text((now - job.created_at).total_seconds()) for job in rows)
    cells = (
        (job.id, job.status, _progress(job), job.model_id, target_text(job), *_result(job), age)
        for job, age in zip(rows, ages, strict=True)
    )
    return text_table(columns, cells, right=("target", "size", "age"))


def _result(job: Job) -> tuple[str, str]:
    """Return the size of a job's result, and its quality; both empty without a result."""
    if job.result is None:
        return "", ""
    size, quality = bytes_text(job.result.stored_bytes), job.result.quality or ""
    if job.result.verdict is not None:
        return size, f"{quality}, {job.result.verdict.outcome}"
    return size, quality if job.result.quality_is_measured or not quality else f"{quality} predicted"


def _progress(job: Job) -> str:
    if job.has_ended:
        return "" if job.error is None else job.error.code
    return " ".join(part for part in (stage_label(job.stage or ""), progress_text(job.progress)) if part)
