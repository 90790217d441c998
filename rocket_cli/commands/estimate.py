"""`rocket estimate`: estimated cost of a job."""

import shlex
from collections.abc import Iterator, Sequence

import typer
from rich.filesize import decimal as bytes_text
from rich.table import Table

from rocket_cli import options
from rocket_cli.connection import OutageNotice, connected, hub_token
from rocket_cli.progress_view import print_line
from rocket_cli.report_table import count_text, percent, wide_console
from rocket_cli.submission import explained_refusals, request_parts
from rocket_client._defaults import DEFAULT_SERVER
from rocket_client.models import Estimate
from rocket_core.budget import remaining_parameters


def estimate(
    *,
    context: typer.Context,
    model_id: options.ServerModel,
    ratio: options.Ratio = None,
    size: options.Size = None,
    calibration: options.ServerCalibration = None,
    samples: options.ServerSamples = None,
    sequence_length: options.SequenceLength = None,
    seed: options.ServerSeed = None,
    preset: options.Preset = None,
    method: options.Method = None,
    objective: options.Objective = None,
    budget: options.Budget = None,
    evaluate: options.EvaluateOn = None,
    evaluate_samples: options.EvaluateSamples = None,
    evaluate_length: options.EvaluateLength = None,
    evaluate_stride: options.EvaluateStride = None,
    task: options.ServerTasks = None,
    task_items: options.TaskItems = None,
    ignore: options.Ignore = None,
    export: options.Export = None,
    dtype: options.ServerDtype = None,
    precision: options.ServerPrecision = None,
    revision: options.Revision = None,
    hub_token_env: options.HubTokenVariable = None,
    server: options.Server = DEFAULT_SERVER,
    as_json: options.JsonResult = False,
) -> None:
    """Show the size that MODEL_ID would have, and the memory and disk that a job needs, without creating a job.

    The options are those of `rocket submit`, and are refused for the same reasons.
    """
    values = locals()
    options.require_target(ratio, size)
    token = hub_token(hub_token_env)
    notice = OutageNotice(server, quiet=as_json)
    with connected(server, as_json=as_json, notice=notice) as rocket, explained_refusals(rocket, values):
        told = rocket.estimate(model_id, ratio=ratio, target_bytes=size, **request_parts(values), hub_token=token)
        notice.end()
    if as_json:
        typer.echo(told.model_dump_json(indent=2))
        return
    console = wide_console()
    console.print(_sizes(told))
    console.print()
    console.print(_needs(told))
    for line in _remarks(told):
        console.print(line, style="dim")
    print_line(f"to make a job of it: {_submission(context.obj or ('estimate',))}")


def _sizes(told: Estimate) -> Table:
    table = _table("now", "factored, at most", "")
    left = remaining_parameters(told.parameters, told.compressible_parameters, told.kept_parameters)
    for name, before, after in (
        ("parameters", told.parameters, left),
        ("of those, compressible", told.compressible_parameters, told.kept_parameters),
    ):
        table.add_row(name, count_text(before), count_text(after), percent(after / before - 1, sign="+"))
    sizes = (bytes_text(count, precision=2) for count in (told.stored_bytes, told.factored_bytes))
    table.add_row("weights", *sizes, percent(told.factored_bytes / told.stored_bytes - 1, sign="+"))
    return table


def _needs(told: Estimate) -> Table:
    free = told.available
    table = _table("needed", *(() if free is None else ("free",)))
    memory, disk = (None, None) if free is None else (free.memory_bytes, free.disk_bytes)
    for name, needed, there_is in (("memory", told.memory_bytes, memory), ("disk", told.disk_bytes, disk)):
        known = "-" if there_is is None else bytes_text(there_is, precision=2)
        table.add_row(name, bytes_text(needed, precision=2), *(() if free is None else (known,)))
    if told.commit is not None:
        table.add_row("download", bytes_text(told.stored_bytes, precision=2))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True)
    # The same width in both tables.
    table.add_column("", no_wrap=True, min_width=len("of those, compressible"))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _remarks(told: Estimate) -> Iterator[str]:
    yield f"Calibrates on {told.calibration_tokens:,} tokens at most"
    if told.nearest_ratio < told.ratio:
        yield (
            f"Certain to be reached are ratios up to {told.nearest_ratio}; whether {told.ratio:.4g} is shows once the "
            "layers are profiled"
        )
    free = told.available
    if free is None:
        return
    if free.memory_bytes is not None and free.memory_bytes < told.memory_bytes:
        yield "The server's CPU has less memory free than that; shorter or fewer samples may take less"
    if free.disk_bytes < told.disk_bytes:
        yield "The server has less disk free than that; one --export takes less than two"


def _submission(arguments: Sequence[str]) -> str:
    """Return the command line that submits the job, quoted for a shell; `arguments` are those of `rocket`."""
    at = arguments.index("estimate")
    return shlex.join(["rocket", *arguments[:at], "submit", *arguments[at + 1 :]])
