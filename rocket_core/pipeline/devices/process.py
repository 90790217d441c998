"""Process that works on blocks for a run; `rocket_core.pipeline.devices.processes` starts it.

It exits as soon as the run closes the connection, whatever it is doing.
"""

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import assert_never

import torch

from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.checkpoint import ModelSource
from rocket_core.config import STAGES
from rocket_core.hub.repository import offline
from rocket_core.linalg.rough_products import fast_products
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.devices.messages import (
    REQUEST,
    Begin,
    CompressBlocks,
    Finished,
    ProfileBlocks,
    Ready,
    Request,
)
from rocket_core.pipeline.observer import Observer
from rocket_core.pipeline.preflight import prepare_run
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.stage_costs import Costs
from rocket_core.pipeline.stages.compress import compress_blocks
from rocket_core.pipeline.stages.profile import ProfilesInOrder, profile_blocks
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.schema import StageReport
from rocket_core.system.child_process import answer, serve
from rocket_core.system.process_memory import keep_freed_memory


def main(arguments: Sequence[str]) -> None:
    """Work on blocks whenever that is requested.

    Args:
        arguments: descriptors of two pipes, for requests and answers.
    """
    serve(arguments, _serve)


def _serve(source: Connection, target: Connection) -> None:
    begin = Begin.model_validate_json(source.recv_bytes())
    torch.set_num_threads(begin.threads)
    keep_freed_memory()
    work = WorkFolder(begin.work)
    with offline():
        run = prepare_run(ModelSource(name=begin.name, folder=begin.folder, commit=begin.commit), begin.config)
        select_device(run)
        inputs = work.inputs()
        assert inputs is not None, "the run has claimed the folder"
        answer(target, Ready())
        while True:
            request = REQUEST.validate_json(source.recv_bytes())
            answer(target, Finished(cost=work_on_blocks(run, inputs, work, request, Observer())))


def select_device(run: Run) -> None:
    """Make the device of a run the current one, on which kernels in Triton run."""
    if run.device.index is not None:
        torch.accelerator.set_device_index(run.device.index)


def work_on_blocks(
    run: Run, inputs: CalibrationInputs, work: WorkFolder, request: Request, observer: Observer
) -> StageReport:
    """Do what a run requests, until no free block is left, and return what it took.

    Args:
        run: the run, as this process has prepared it.
        inputs: calibration samples.
        work: work folder of the run.
        request: the request.
        observer: notified of progress, and of profiles in an order of this process alone.
    """
    monitor = Monitor(observer, Costs(run.device, {}), stages=STAGES)
    with fast_products():
        _work(run, inputs, work, request, monitor)
    [cost] = monitor.costs.stages
    return cost


def _work(run: Run, inputs: CalibrationInputs, work: WorkFolder, request: Request, monitor: Monitor) -> None:
    match request:
        case ProfileBlocks():
            with monitor.stage("calibrating"):
                profile_blocks(run, inputs, work, ProfilesInOrder(run, work, monitor))
        case CompressBlocks():
            with monitor.stage("factorizing"):
                compress_blocks(run, inputs, work, request, monitor)
        case _:
            assert_never(request)
