"""`rocket profile`: submission of a job that only profiles a model."""

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


def profile(
    *,
    model_id: options.ServerModel,
    calibration: options.ServerCalibration = None,
    samples: options.ServerSamples = None,
    sequence_length: options.SequenceLength = None,
    seed: options.ServerSeed = None,
    preset: options.Preset = None,
    objective: options.Objective = None,
    budget: options.Budget = None,
    ignore: options.Ignore = None,
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
    """Submit a job that only calibrates and profiles MODEL_ID, and print its id.

    Afterwards `rocket frontier JOB` shows size and error at any ratio, and `rocket submit` with the same options starts
    after the calibration.
    """
    values = locals()
    labels, token = read_labels(metadata or ()), hub_token(hub_token_env)
    notice = OutageNotice(server, quiet=as_json)
    with connected(server, as_json=as_json, notice=notice) as rocket:
        with explained_refusals(rocket, values):
            job = rocket.profile(
                model_id,
                **request_parts(values),
                metadata=labels,
                queue=queue,
                idempotency_key=idempotency_key,
                hub_token=token,
            )
        job = follow_submission(rocket, job, notice, watch=watch, quiet=as_json)
    end_submission(job, server, watched=watch, as_json=as_json)
