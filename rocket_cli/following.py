"""Progress and outcome of a job, as `rocket watch` and `rocket submit --watch` show them."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer

from rocket_cli.connection import Connection, command
from rocket_cli.exit_codes import Failure, exit_code_of_code, report_failure
from rocket_cli.progress_view import ProgressView, print_line, progress_view
from rocket_client.errors import DetachedError
from rocket_client.models import Event, Job, Progress
from rocket_core.config import stage_label
from rocket_core.errors import ExitCode
from rocket_core.report.formatting import bytes_text, count_text, duration_text, percent_text

if TYPE_CHECKING:
    from rocket_client.client import Rocket


class JobView:
    """Adapter from a job's stream of events to a progress view.

    Args:
        view: the progress view.
    """

    def __init__(self, view: ProgressView) -> None:
        self._view = view
        self._layer = ""
        self._stage = ""

    def show(self, update: Event | Progress | Job) -> None:
        """Show an update."""
        if isinstance(update, Event):
            self._note(update)
            return
        # A job that is being cancelled still has its last stage, but its status matters more.
        stage = update.stage if update.status == "running" and update.stage else update.status
        if stage != self._stage:
            self._stage, self._layer = stage, ""
        self._view.show(stage, self._layer, update.progress, seconds_until(update.estimated_finish_at))

    def _note(self, event: Event) -> None:
        if event.type == "layer":
            self._layer = str(event.data.get("layer", ""))
        if event.type == "healing":
            self._layer = event.message.removeprefix("healing: ")
        if event.level in {"warning", "error"}:
            print_line(f"{event.level}: {event.message}")


def follow_job(rocket: "Rocket", job: Job, connection: Connection) -> Job:
    """Show the progress of a job until it ends, and return the ended job.

    Raises:
        DetachedError: the user pressed Ctrl-C.
    """
    if job.has_ended:
        return job
    try:
        with progress_view(quiet=connection.as_json) as view:
            shown = JobView(view)
            shown.show(job)

            def show(update: Event | Progress) -> None:
                connection.notice.end()
                shown.show(update)

            return rocket.wait(job.id, on_news=show)
    except KeyboardInterrupt as error:
        again, stop = command(rocket.server, "watch", job.id), command(rocket.server, "cancel", job.id)
        raise DetachedError(f"{job.id} continues; `{again}` follows it again, `{stop}` cancels it") from error


def report_end(job: Job, connection: Connection) -> ExitCode:
    """Write the outcome of a job, and return the matching exit code."""
    if connection.as_json:
        typer.echo(job.model_dump_json(indent=2))
    if job.status == "succeeded":
        if not connection.as_json:
            _print_result(job, connection)
        return ExitCode.NOT_ACCEPTED if _is_refused(job) else ExitCode.OK
    failure = _failure(job, connection)
    # The JSON of the job, written above, includes its error.
    report_failure(failure, as_json=False)
    return failure.exit_code


def _is_refused(job: Job) -> bool:
    """Return whether a job with bounds has a result that does not meet them."""
    verdict = None if job.result is None else job.result.verdict
    # The files of an export have the report of the job that they are from.
    return job.accept is not None and verdict is not None and not verdict.is_accepted


def seconds_until(at: datetime | None) -> float | None:
    """Return the seconds from now, >= 0; None if the time is unknown."""
    return None if at is None else max(0.0, (at - datetime.now(UTC)).total_seconds())


def _failure(job: Job, connection: Connection) -> Failure:
    again = f"`{connection.command('retry', job.id)}` resumes from its checkpoints"
    if job.error is None:
        code = ExitCode.CANCELLED if job.status == "cancelled" else ExitCode.INTERNAL
        return Failure(code=job.status, message=f"{job.id} is {job.status}; {again}", exit_code=code)
    position = " at ".join(part for part in (stage_label(job.error.stage or ""), job.error.layer) if part)
    where = f" while {position}" if position else ""
    return Failure(
        code=job.error.code,
        message=f"{job.id} failed{where}: {job.error.message}" + (f"; {again}" if job.error.retryable else ""),
        exit_code=exit_code_of_code(job.error.code, retryable=job.error.retryable),
    )


def _print_result(job: Job, connection: Connection) -> None:
    took = ""
    if job.started_at is not None and job.finished_at is not None:
        took = f" in {duration_text((job.finished_at - job.started_at).total_seconds())}"
    typer.echo(f"{job.id} succeeded{took}")
    if job.result is not None:
        kept, all_ = count_text(job.result.kept_parameters), count_text(job.result.compressible_parameters)
        removed = percent_text(job.result.achieved_ratio)
        # Quantized layers keep all of them.
        if job.result.kept_parameters < job.result.compressible_parameters:
            typer.echo(f"Parameters: {kept} of {all_} compressible ones kept, {removed} removed")
        stored, dense = bytes_text(job.result.stored_bytes), bytes_text(job.result.dense_bytes)
        typer.echo(f"Size on disk: {stored}, {dense} before")
        if job.result.verdict is not None:
            typer.echo(f"Verdict: {job.result.verdict.text}")
    if job.kind == "profile":
        typer.echo(f"    {connection.command('frontier', job.id)}")
        return
    if job.push is not None:
        typer.echo(f"Pushed to {job.push.repository}")
    if job.result is None:
        return
    typer.echo(f"    {connection.command('report', job.id)}")
    typer.echo(f"    {connection.command('download', job.id)}")
