"""A process that compresses a model until it kills itself; forked, as importing the library takes most of its time."""

import json
import os
import signal
from pathlib import Path

import torch

from rocket_core.config import CompressionConfig
from rocket_core.pipeline import compress
from rocket_core.pipeline.state import healing_state
from tests.reference.observers import Watch
from tests.reference.tiny_vision import stand_in_for_libraries


def run(descriptors):
    """Compress up to a step, and end without any handler, like the system's out-of-memory killer.

    The descriptor is that of a file with the model, the output folder, the settings, the step, and a stage if only its
    named steps are counted. Every step of healing is a checkpoint.
    """
    with os.fdopen(descriptors[0]) as file:
        model, output, config, last, *stage = json.load(file)
    # Equal bytes are promised at equal thread counts.
    torch.set_num_threads(1)
    stand_in_for_libraries()
    steps = iter(range(10**9))
    healing_state._SECONDS = healing_state._TIMES_ITS_COST = 0

    def on_progress(progress):
        is_counted = not stage or (progress.stage in stage and progress.layer is not None)
        if is_counted and next(steps) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    settings = CompressionConfig.model_validate_json(config)
    compress(model, Path(output), settings, resume=True, observer=Watch(on_progress=on_progress))
