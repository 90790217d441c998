"""Programs for the processes of further devices, each chosen as `rocket_core.pipeline.devices.processes.PROGRAM`.

The variable ROCKET_TEST_FATE says what happens to it: `simulated` computes on the simulated accelerator, `late`
answers half a second after its last block, `killed` and `out of memory` end it at the second layer of a block.
"""

import os
import signal
import time

import torch

from rocket_core.pipeline.devices import process
from rocket_core.pipeline.stages import compress, profile
from tests.reference.simulated_device import install

NAME = "tests.reference.device_processes"


def main(arguments):
    """Run the process."""
    fate = os.environ["ROCKET_TEST_FATE"]
    if fate == "simulated":
        install()
    elif fate == "late":
        _answer_late()
    else:
        _end_at_the_second_layer(profile, "_profile_one", fate)
        _end_at_the_second_layer(compress, "_compress_one", fate)
    process.main(arguments)


def _answer_late():
    original = process.answer

    def late(target, message):
        time.sleep(0.5)
        original(target, message)

    process.answer = late


def _end_at_the_second_layer(module, name, fate):
    original, calls = getattr(module, name), iter(range(10**9))

    def ending(*arguments):
        if next(calls) < 1:
            return original(*arguments)
        if fate == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    setattr(module, name, ending)
