"""`rocket estimate`: estimated cost of a job."""

import shlex
from collections.abc import Iterator, Sequence

import typer
from rich.table import Table

from rocket_cli import options
from rocket_cli.compression_options import ServerOptions
from rocket_cli.connection import OutageNotice, connected, hub_token
from rocket_cli.option_groups import expand_groups
from rocket_cli.progress_view import print_line
from rocket_cli.report_table import wide_console
from rocket_cli.submission import explained_refusals
from rocket_client._defaults import DEFAULT_SERVER
from rocket_client.models import Estimate
from rocket_core.budget import remaining_parameters
from rocket_core.report.formatting import bytes_text, count_text, duration_text, percent_text

# See `Estimate.seconds`.
_TIME_FACTOR = 1.5


@expand_groups
def estimate(
    *,
    context: typer.Context,
    model_id: options.ServerModel,
    compression: ServerOptions,
    hub_token_env: options.HubTokenVariable = None,
    server: options.Server = DEFAULT_SERVER,
    as_json: options.JsonResult = False,
) -> None:
    """Estimate the compressed size of MODEL_ID and the memory and disk that a job needs, without creating a job.

    Takes the options of `rocket submit`, and rejects them for the same reasons.
    """
    compression.check_target()
    token = hub_token(hub_token_env)
    notice = OutageNotice(server, quiet=as_json)
    with connected(server, as_json=as_json, notice=notice) as rocket, explained_refusals(rocket, model_id, compression):
        result = rocket.estimate(model_id, **compression.compression_request(), hub_token=token)
        notice.end()
    if as_json:
        typer.echo(result.model_dump_json(indent=2))
        return
    console = wide_console()
    console.print(_sizes(result))
    console.print()
    console.print(_needs(result))
    for line in _remarks(result):
        console.print(line, style="dim")
    print_line(f"to submit it as a job: {_submission(context.obj or ('estimate',))}")


def _sizes(result: Estimate) -> Table:
    table = _table("now", "factored, at most", "")
    left = remaining_parameters(result.parameters, result.compressible_parameters, result.kept_parameters)
    for name, before, after in (
        ("parameters", result.parameters, left),
        ("of those, compressible", result.compressible_parameters, result.kept_parameters),
    ):
        table.add_row(name, count_text(before), count_text(after), percent_text(after / before - 1, sign="+"))
    sizes = (bytes_text(count) for count in (result.stored_bytes, result.factored_bytes))
    table.add_row("weights", *sizes, percent_text(result.factored_bytes / result.stored_bytes - 1, sign="+"))
    return table


def _needs(result: Estimate) -> Table:
    free = result.available
    table = _table("needed", *(() if free is None else ("free",)))
    memory, disk = (None, None) if free is None else (free.memory_bytes, free.disk_bytes)
    for name, needed, free_bytes in (("memory", result.memory_bytes, memory), ("disk", result.disk_bytes, disk)):
        known = "-" if free_bytes is None else bytes_text(free_bytes)
        table.add_row(name, bytes_text(needed), *(() if free is None else (known,)))
    if result.commit is not None:
        table.add_row("download", bytes_text(result.stored_bytes))
    if result.seconds is not None:
        table.add_row("time", f"about {duration_text(result.seconds)}")
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True)
    # The same width in both tables.
    table.add_column("", no_wrap=True, min_width=len("of those, compressible"))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _remarks(result: Estimate) -> Iterator[str]:
    yield f"Selected: {percent_text(result.selected_bytes / result.stored_bytes)} of the model's bytes"
    for warning in result.warnings:
        yield f"Warning: {warning}"
    yield f"Calibrates on at most {result.calibration_tokens:,} tokens"
    if result.seconds is not None:
        shortest, longest = (duration_text(result.seconds * factor) for factor in (1 / _TIME_FACTOR, _TIME_FACTOR))
        yield f"The time is between {shortest} and {longest} for most models, on a server that does nothing else"
    if result.nearest_ratio < result.ratio:
        yield (
            f"Ratios up to {result.nearest_ratio} are certain to be reachable; whether {result.ratio:.4g} is, is known "
            "once the layers are profiled"
        )
    free = result.available
    if free is None:
        return
    if free.memory_bytes is not None and free.memory_bytes < result.memory_bytes:
        yield "The server has less free memory than that; shorter or fewer samples need less"
    if free.disk_bytes < result.disk_bytes:
        yield "The server has less free disk space than that; a single --export needs less"


def _submission(arguments: Sequence[str]) -> str:
    """Return the command line that submits the job, quoted for a shell; `arguments` are those of `rocket`."""
    at = arguments.index("estimate")
    return shlex.join(["rocket", *arguments[:at], "submit", *arguments[at + 1 :]])
