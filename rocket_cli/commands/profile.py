"""`rocket profile`: submission of a job that only profiles a model."""

from typing import Annotated

from rocket_cli import options
from rocket_cli.compression_options import (
    ACCEPTANCE_SETTINGS,
    CONTEXT_OPTIONS,
    EVALUATION_SETTINGS,
    TARGETS,
    ServerOptions,
    SubmissionOptions,
)
from rocket_cli.connection import Connection
from rocket_cli.option_groups import Without
from rocket_cli.submission import submit_job

# All but the target, the method, the evaluation and the exports, on which a profile does not depend.
_OMITTED = (
    *TARGETS,
    *CONTEXT_OPTIONS,
    "method",
    "heal",
    "export",
    "benchmark",
    *EVALUATION_SETTINGS,
    *ACCEPTANCE_SETTINGS,
)
ProfileOptions = Annotated[ServerOptions, Without(*_OMITTED)]


def profile(
    *, model_id: options.ServerModel, calibration: ProfileOptions, submission: SubmissionOptions, connection: Connection
) -> None:
    """Submit a job that profiles MODEL_ID without compressing it, and print its id.

    Afterwards `rocket frontier JOB` shows size and error at any ratio, and `rocket submit` with the same options
    needs no calibration.
    """
    submit_job(
        lambda rocket, arguments: rocket.profile(model_id, **calibration.request(), **arguments),
        model_id,
        submission,
        connection,
        calibration,
    )
