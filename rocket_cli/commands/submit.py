"""`rocket submit`: submission of a compression job."""

from rocket_cli import options
from rocket_cli.connection import OutageNotice, connected, hub_token
from rocket_cli.submission import (
    end_submission,
    explained_refusals,
    follow_submission,
    read_labels,
    request_parts,
)
from rocket_client._defaults import DEFAULT_SERVER


def submit(
    *,
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
    metadata: options.Metadata = None,
    queue: options.JobQueue = None,
    idempotency_key: options.IdempotencyKey = None,
    hub_token_env: options.HubTokenVariable = None,
    watch: options.Watch = False,
    server: options.Server = DEFAULT_SERVER,
    as_json: options.JsonResult = False,
) -> None:
    """Submit a job that compresses MODEL_ID, and print its id.

    Options that are not given take the server's defaults.
    """
    values = locals()
    options.require_target(ratio, size)
    labels, token = read_labels(metadata or ()), hub_token(hub_token_env)
    notice = OutageNotice(server, quiet=as_json)
    with connected(server, as_json=as_json, notice=notice) as rocket:
        with explained_refusals(rocket, values):
            job = rocket.submit(
                model_id,
                ratio=ratio,
                target_bytes=size,
                **request_parts(values),
                metadata=labels,
                queue=queue,
                idempotency_key=idempotency_key,
                hub_token=token,
            )
        job = follow_submission(rocket, job, notice, watch=watch, quiet=as_json)
    end_submission(job, server, watched=watch, as_json=as_json)
