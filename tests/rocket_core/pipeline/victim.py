"""A process that compresses a model until it kills itself; forked, as importing the library takes most of its time."""

import json
import os
import signal
from pathlib import Path

import torch

from rocket_core.config import CompressionConfig
from rocket_core.pipeline import compress


def run(descriptors):
    """Compress up to a step, and end without any handler, like the system's out-of-memory killer.

    The descriptor is that of a file with the model, the output folder, the settings and the step.
    """
    with os.fdopen(descriptors[0]) as file:
        model, output, config, last = json.load(file)
    # Equal bytes are promised at equal thread counts.
    torch.set_num_threads(1)
    steps = iter(range(10**9))

    def on_progress(_progress):
        if next(steps) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    settings = CompressionConfig.model_validate_json(config)
    compress(model, Path(output), settings, resume=True, on_progress=on_progress)
