"""Process that runs the library on an untrusted model: `python -m worker.confined.compute DESCRIPTOR PARENT JOB`.

    worker                           queue, database, store, secrets
    └── worker.attempt.job           one attempt at a job: its lease, database, store, secrets
        ├── worker.confined.fetch    downloads a model from the Hub: network and a Hub token; loads nothing
        └── worker.confined.compute  reads the model: files of this job, limited memory, no network, no secrets

This process is confined before it reads anything; see `worker.confined.confinement` for the first message to it. Its
results go to the attempt through one connection, and as files into the output folder.
"""

import argparse
import functools
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import NoReturn

from app.shared.confinement import close_network
from worker.confined.confinement import start_confined
from worker.processes.channel import Channel
from worker.processes.linux import die_with


def run(channel: Channel) -> None:
    """Confine this process and do the work of one attempt.

    Args:
        channel: connection to the attempt.

    Raises:
        ChannelError: the attempt has ended.
    """
    confinement, stop = start_confined(channel)
    # Imported here because it starts threads, which would not be confined if they were started earlier.
    from worker.confined.computation import Computation, receive_request
    from worker.confined.messages import COMPUTE_REQUEST

    request = receive_request(channel, COMPUTE_REQUEST)
    go_offline = functools.partial(close_network, required=confinement.required)
    Computation(channel, request, should_cancel=stop.is_set, close_network=go_offline).run()


def connect() -> Channel:
    """Return the connection to the attempt that started this process."""
    parser = argparse.ArgumentParser(description="A process of a job; started by worker.attempt.job.")
    parser.add_argument("descriptor", type=int, help="number of the connected socket")
    parser.add_argument("parent", type=int, help="process id of the attempt")
    parser.add_argument("job", help="id of the job, for people who list processes")
    given = parser.parse_args()
    die_with(given.parent)
    return Channel(socket.socket(fileno=given.descriptor))


def main(work: Callable[[Channel], None] = run) -> NoReturn:
    """Do the work of one attempt, and exit.

    Immediately, as everything is sent, and libraries and hanging threads have nothing to clean up.
    """
    work(connect())
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
