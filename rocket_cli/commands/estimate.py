"""`rocket estimate`: estimated sizes and needs of a compression, on this machine or as a job of a server."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import typer
from rich.table import Table

from rocket_cli import options
from rocket_cli.compression_options import ServerOptions
from rocket_cli.connection import Connection, hub_token
from rocket_cli.exit_codes import reported_failures
from rocket_cli.progress_view import print_line
from rocket_cli.report_table import memory_table, wide_console
from rocket_cli.submission import explained_refusals
from rocket_client.errors import ServerUnreachableError
from rocket_client.models import Available, Estimate
from rocket_core.engines import ENGINES, ROCKET
from rocket_core.report.formatting import bytes_text, count_text, duration_text, percent_text
from rocket_core.sizes.budget import remaining_parameters

# See `Estimate.seconds`.
_TIME_FACTOR = 1.5
# Models that only a server knows.
_OF_SERVERS = ("local/", "upload/")
# Options that `rocket compress` does not have, with whether a value follows.
_NOT_FOR_RUNS = {"--local": False, "--server": True, "--hub-token-env": True}


def estimate(
    *,
    call: typer.Context,
    model_id: options.EstimatedModel,
    compression: ServerOptions,
    local: options.Local = False,
    hub_token_env: options.HubTokenVariable = None,
    connection: Connection,
) -> None:
    """Estimate the compressed size of MODEL, and the memory, disk and time that it takes, without compressing it.

    For a folder, and with --local for a repository on the Hub as well, this is the estimate of `rocket compress` on
    this machine, and needs no server. Otherwise it is that of a job, and the server answers. What the compression or
    the job would reject is rejected for the same reasons.
    """
    compression.check_target()
    token = hub_token(hub_token_env)
    is_here = local or (Path(model_id).expanduser().is_dir() and not model_id.startswith(_OF_SERVERS))
    if is_here:
        with reported_failures(as_json=connection.as_json):
            result = _estimate_here(model_id, compression, token)
    else:
        result = _ask(connection, model_id, compression, token)
    if connection.as_json:
        typer.echo(result.model_dump_json(indent=2))
        return
    console = wide_console()
    console.print(_sizes(result))
    console.print()
    console.print(_needs(result))
    if result.fit is not None:
        console.print()
        engine = ENGINES[compression.engine or ROCKET.name].title
        console.print(memory_table(result.fit.parts(engine, result.fit.weights_bytes)))
    for line in _remarks(result, where="This machine" if is_here else "The server"):
        console.print(line, style="dim")
    command = call.obj or ("estimate", model_id)
    if is_here:
        print_line(f"to run it: {_run(command, model_id)}")
    else:
        print_line(f"to submit it as a job: {_submission(command)}")


def _ask(connection: Connection, model: str, compression: ServerOptions, token: str | None) -> Estimate:
    if not model.startswith(_OF_SERVERS):
        from rocket_core.hub.requests import check_is_repository

        with reported_failures(as_json=connection.as_json):
            check_is_repository(model, compression.revision)
    with connection.client() as rocket, explained_refusals(rocket, model, compression):
        try:
            result = rocket.estimate(model, **compression.compression_request(), hub_token=token)
        except ServerUnreachableError:
            if not connection.as_json and not model.startswith(_OF_SERVERS):
                print_line("with --local, a repository is estimated on this machine, without a server")
            raise
        connection.notice.end()
    return result


def _estimate_here(model: str, compression: ServerOptions, token: str | None) -> Estimate:
    from rocket_core.estimates.estimate import estimate_run, expected_seconds, why_not_timed_here
    from rocket_core.exports.gguf_size import dense_file_bytes
    from rocket_core.hub.requests import inspect_model
    from rocket_core.system.machine import free_disk, free_machine_memory

    config = compression.config(dtype=compression.dtype, precision=compression.precision)
    found = inspect_model(model, config, revision=compression.revision, token=token, file_size=dense_file_bytes)
    estimated = estimate_run(found.settings, found.weights, config, dense_file_bytes=found.dense_file_bytes)
    warning = estimated.coverage.warning
    return Estimate(
        **asdict(estimated) | {"fit": None if estimated.fit is None else estimated.fit.model_dump()},
        model_id=model,
        commit=found.commit,
        selected_bytes=estimated.coverage.selected_bytes,
        warnings=() if warning is None else (warning,),
        available=Available(memory_bytes=free_machine_memory(), disk_bytes=free_disk(Path.cwd())),
        seconds=expected_seconds(estimated.operations),
        seconds_unknown=estimated.why_no_time or why_not_timed_here(),
    )


def _sizes(result: Estimate) -> Table:
    table = _table("now", "compressed, at most", "")
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


def _remarks(result: Estimate, *, where: str) -> Iterator[str]:
    yield f"Selected: {percent_text(result.selected_bytes / result.stored_bytes)} of the model's bytes"
    for warning in result.warnings:
        yield f"Warning: {warning}"
    yield f"Calibrates on at most {result.calibration_tokens:,} tokens"
    if result.seconds is not None:
        shortest, longest = (duration_text(result.seconds * factor) for factor in (1 / _TIME_FACTOR, _TIME_FACTOR))
        yield f"The time is between {shortest} and {longest} for most models, if nothing else runs"
    elif result.seconds_unknown is not None:
        yield f"How long it takes is not known: {result.seconds_unknown}"
    if result.nearest_ratio < result.ratio:
        yield (
            f"Ratios up to {result.nearest_ratio} are certain to be reachable; whether {result.ratio:.4g} is, is known "
            "once the layers are profiled"
        )
    free = result.available
    if free is None:
        return
    if free.memory_bytes is not None and free.memory_bytes < result.memory_bytes:
        yield f"{where} has less free memory than that; shorter or fewer samples need less"
    if free.disk_bytes < result.disk_bytes:
        yield f"{where} has less free disk space than that; free some, or name a single --export"


def _submission(arguments: Sequence[str]) -> str:
    """Return the command line that submits the job, quoted for a shell; `arguments` are those of `rocket`."""
    at = arguments.index("estimate")
    return shlex.join(["rocket", *arguments[:at], "submit", *arguments[at + 1 :]])


def _run(arguments: Sequence[str], model: str) -> str:
    """Return the command line that compresses the model on this machine."""
    kept: list[str] = []
    rest = iter(arguments[arguments.index("estimate") + 1 :])
    for argument in rest:
        name, equals, _ = argument.partition("=")
        if name not in _NOT_FOR_RUNS:
            kept.append(argument)
        elif _NOT_FOR_RUNS[name] and not equals:
            next(rest, None)
    kept.insert(kept.index(model) + 1, "OUT")
    return shlex.join(["rocket", "compress", *kept])
