"""Helping a run of another machine with its blocks; both share its work folder."""

import secrets
import socket
import time
from pathlib import Path

import torch

from rocket_core.checkpoint import ModelSource
from rocket_core.config import WORK_FOLDER_NAME
from rocket_core.errors import CompressionCancelledError
from rocket_core.hub.repository import offline
from rocket_core.pipeline.devices.messages import Offer, Request
from rocket_core.pipeline.devices.offers import Offers
from rocket_core.pipeline.devices.process import select_device, work_on_blocks
from rocket_core.pipeline.observer import Observer
from rocket_core.pipeline.preflight import prepare_run
from rocket_core.pipeline.requirements import check_resources
from rocket_core.pipeline.resource_errors import resource_errors
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.system.process_memory import keep_freed_memory

_LOOK_SECONDS = 0.5


def help_run(model: ModelSource, output: Path, *, device: str = "auto", observer: Observer = Observer()) -> None:
    """Profile and compress blocks of a run that no other process works on, until the run offers none any more.

    The result is that of the run by itself; to the byte, if both machines have processors, or GPUs, of one kind. Each
    helper passes the calibration text through the model, and takes one device.

    Args:
        model: the model, with the files that the run reads.
        output: output folder of the run; nothing is done until the run has checked its inputs and claimed the folder.
        device: compute device, as in `CompressionConfig`.
        observer: notified of the estimated memory; may end the work.

    Raises:
        CompressionCancelledError: the observer has ended the work.
        RocketError: the work cannot be done here, e.g. for lack of memory.
    """
    keep_freed_memory()
    work = WorkFolder(output / WORK_FOLDER_NAME)
    offers = Offers(work)
    while (offer := offers.find()) is None:
        _pause(observer)
    with resource_errors(output), offline():
        _help(model, offer, device, work, offers, observer)


def _help(model: ModelSource, offer: Offer, device: str, work: WorkFolder, offers: Offers, observer: Observer) -> None:
    torch.set_num_threads(offer.threads)
    run = prepare_run(model, offer.config.model_copy(update={"device": device}))
    select_device(run)
    inputs = work.inputs()
    assert inputs is not None, "a run that makes offers has claimed its folder"
    observer.on_requirements(check_resources(run, inputs, work.path.parent, held=work.stored_bytes).memory_bytes)
    name = f"{socket.gethostname()}-{secrets.token_hex(4)}"
    done: Request | None = None
    while (current := offers.find()) is not None:
        if current.request is None or current.request == done:
            _pause(observer)
            continue
        done = current.request
        with offers.taking_part(name) as charge:
            charge(work_on_blocks(run, inputs, work, done, _Cancelling(observer)))


def _pause(observer: Observer) -> None:
    if observer.should_cancel():
        raise CompressionCancelledError("stopped helping; what is finished is kept")
    time.sleep(_LOOK_SECONDS)


class _Cancelling(Observer):
    """An observer that only passes on whether to end: progress and profiles are reported by the run itself."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def should_cancel(self) -> bool:
        """See `Observer`."""
        return self._observer.should_cancel()
