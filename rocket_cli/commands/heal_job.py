"""`rocket heal-job`: submission of a job that heals the result of another one."""

from rocket_cli import options
from rocket_cli.compression_options import ServerOptions, SubmissionOptions
from rocket_cli.connection import Connection
from rocket_cli.submission import submit_job
from rocket_core.config import DEFAULT_HEALING_TOKENS


def heal_job(
    *,
    job_id: options.JobId,
    tokens: options.HealingTokens = DEFAULT_HEALING_TOKENS,
    calibration: options.HealingText = None,
    sequence_length: options.HealingLength = None,
    seed: options.HealingSeed = None,
    submission: SubmissionOptions,
    connection: Connection,
) -> None:
    """Submit a job that heals the result of JOB, in the same format and size, and print its id.

    The numbers that its layers store are trained towards the predictions of the model that it was made from.
    """
    text = {"dataset": calibration, "sequence_length": sequence_length, "seed": seed}
    submit_job(
        lambda rocket, arguments: rocket.heal(job_id, tokens=tokens, calibration=text, **arguments),
        job_id,
        submission,
        connection,
        ServerOptions(calibration=calibration),
    )
