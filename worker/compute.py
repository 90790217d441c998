"""`python -m worker.compute DESCRIPTOR PARENT JOB`: the library, run on a stranger's model.

    worker                  queue, database, store, secrets
    └── worker.job          one attempt at a job: its lease, database, store, secrets
        ├── worker.fetch    downloads a model of the Hub: a network and a Hub token; loads nothing
        └── worker.compute  reads the model: files of this job, limited memory, no network, no secret

This process is confined before it reads anything: see `worker.confinement` for what it is told first. Everything that
it finds out goes to the attempt through one connection, and as files into the output folder.
"""

import argparse
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from app.shared.confinement import close_network, limit_memory
from worker.channel import Channel
from worker.confinement import enter_confinement
from worker.process import die_with, set_on_sigterm


def run(channel: Channel) -> None:
    """Confine this process and do the work of one attempt.

    Args:
        channel: connection to the attempt.

    Raises:
        ChannelError: the attempt is gone.
    """
    stop = threading.Event()
    set_on_sigterm(stop)
    enter_confinement(channel)
    # Starts threads, for which the confinement would come too late.
    from worker.computation import Computation, receive_request

    request = receive_request(channel)
    Computation(
        channel, request, should_cancel=stop.is_set, limit_memory=limit_memory, close_network=close_network
    ).run()


def connect(arguments: Sequence[str] | None = None) -> Channel:
    """Return the connection to the attempt that has started this process."""
    parser = argparse.ArgumentParser(description="A process of a job; started by worker.job.")
    parser.add_argument("descriptor", type=int, help="number of the connected socket")
    parser.add_argument("parent", type=int, help="process id of the attempt")
    parser.add_argument("job", help="id of the job, for people who list processes")
    given = parser.parse_args(arguments)
    die_with(given.parent)
    return Channel(socket.socket(fileno=given.descriptor))


def end() -> NoReturn:
    """End this process at once: all is said, and neither libraries nor threads that hang have anything to tidy up."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Do the work of one attempt."""
    run(connect(arguments))
    end()


if __name__ == "__main__":
    main()
