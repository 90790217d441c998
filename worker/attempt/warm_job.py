"""Process of an attempt, forked from one that has imported the library; see `worker.processes.job_processes`.

Compared with `python -m worker.attempt.job`, everything is the same but for the imports: the process leads a session,
runs in the job's folder, and receives its arguments and settings, with all secrets, only after it has forked the
processes that will read the model.
"""

import importlib
import logging
import os
import socket
import sys
from collections.abc import Sequence

from huggingface_hub import constants

from worker.attempt import job
from worker.processes.channel import Channel, ChannelClosedError
from worker.processes.job_processes import JOB_START
from worker.processes.spares import Spares, adopt_environment

# One for the download and one for the computation; further ones are started as programs.
_SPARES = 2


def run(descriptors: Sequence[int]) -> None:
    """Wait for a job and run one attempt at it.

    Args:
        descriptors: the socket that the supervisor sends a `JobStart` to.
    """
    sys.exit(_run(descriptors))


def _run(descriptors: Sequence[int]) -> int:
    parent = os.getppid()
    # The terminal's Ctrl-C must not reach it, and killing its group must reach everything that it starts.
    os.setsid()
    connection = socket.socket(fileno=descriptors[0])
    spares = Spares(_SPARES, unneeded=(connection,))
    channel = Channel(connection)
    try:
        start = channel.receive(JOB_START)
    except ChannelClosedError:
        return 0
    assert start is not None
    channel.close()
    arguments = [*start.arguments[:2], str(parent), *start.arguments[2:]]
    adopt_environment(start.environment, " ".join([sys.executable, "-P", "-m", "worker.attempt.job", *arguments]))
    # The Hub's client reads variables when it is imported: here, those of the template.
    importlib.reload(constants)
    os.chdir(start.folder)
    code = job.main(arguments, launch=spares)
    logging.shutdown()
    return code
