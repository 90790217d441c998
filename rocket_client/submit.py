"""`rocket submit`: hands a compression to a server."""

from collections.abc import Sequence
from typing import Any

import typer

from rocket_client import options
from rocket_client.defaults import DEFAULT_SERVER
from rocket_client.errors import ProblemError
from rocket_client.progress import print_line
from rocket_client.remote import OutageNotice, command, connected, explain_names, hub_token
from rocket_client.watch import follow_job, report_end

NAME = "submit"


def submit(
    *,
    model_id: options.ServerModel,
    ratio: options.ServerRatio,
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
    metadata: options.Metadata = None,
    queue: options.JobQueue = None,
    idempotency_key: options.IdempotencyKey = None,
    hub_token_env: options.HubTokenVariable = None,
    watch: options.Watch = False,
    server: options.Server = DEFAULT_SERVER,
    as_json: options.JsonResult = False,
) -> None:
    """Have a server compress MODEL_ID; the job's id goes to stdout.

    What is not given takes the server's defaults.
    """
    labels, token = _labels(metadata or ()), hub_token(hub_token_env)
    text = {"dataset": calibration, "samples": samples, "sequence_length": sequence_length, "seed": seed}
    settings = {
        "preset": preset,
        "method": method,
        "objective": objective,
        "budget": budget,
        "ignore": ignore,
        "export": export,
        "dtype": dtype,
        "precision": precision,
    }
    comparison = options.evaluation(
        dataset=evaluate,
        samples=evaluate_samples,
        sequence_length=evaluate_length,
        stride=evaluate_stride,
        tasks=task,
        task_items=task_items,
    )
    notice = OutageNotice(server, quiet=as_json)
    with connected(server, as_json=as_json, notice=notice) as rocket:
        try:
            job = rocket.submit(
                model_id,
                ratio=ratio,
                revision=revision,
                calibration=_given(text),
                options=_given(settings),
                evaluate=comparison,
                metadata=labels,
                queue=queue,
                idempotency_key=idempotency_key,
                hub_token=token,
            )
        except ProblemError as error:
            raise explain_names(rocket, error, model_id=model_id, datasets=(calibration, evaluate)) from error
        notice.end()
        if not as_json:
            typer.echo(job.id)
        if watch:
            job = follow_job(rocket, job, notice, quiet=as_json)
    if watch:
        raise typer.Exit(report_end(job, server, as_json=as_json))
    if as_json:
        typer.echo(job.model_dump_json(indent=2))
    else:
        print_line(f"submitted; `{command(server, 'watch', job.id)}` shows how it comes along")


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _labels(pairs: Sequence[str]) -> dict[str, str]:
    labels = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{pair!r} is no label; write KEY=VALUE", param_hint="--metadata")
        labels[key] = value
    return labels
