"""Process that downloads a model from the Hub, without loading it.

    python -m worker.confined.fetch DESCRIPTOR PARENT JOB

It has network access and the job's or the operator's Hub token, but no other secrets and no files except the cache.
"""

import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from worker.confined.compute import main
from worker.confined.confinement import start_confined
from worker.processes.channel import Channel

if TYPE_CHECKING:
    from rocket_core.report.schema import StageReport
    from rocket_core.system.energy import EnergyMeter
    from worker.confined.messages import Downloaded, FetchRequest

_STAGE = "downloading"


def run(channel: Channel) -> None:
    """Confine this process and download a model.

    Raises:
        ChannelError: the attempt has ended.
    """
    _confinement, stop = start_confined(channel)
    # Imported here because it starts threads, which would not be confined if they were started earlier.
    from worker.confined.computation import receive_request
    from worker.confined.messages import FETCH_REQUEST

    fetch(channel, receive_request(channel, FETCH_REQUEST), should_cancel=stop.is_set)


def fetch(channel: Channel, request: "FetchRequest", *, should_cancel: Callable[[], bool]) -> None:
    """Download a model, and send the outcome.

    Args:
        channel: connection to the attempt.
        request: the model, and where to keep it.
        should_cancel: called repeatedly; True ends the download.
    """
    from rocket_core.errors import CompressionCancelledError
    from worker.confined.computation import send_outcome
    from worker.confined.messages import Transferred

    def check() -> None:
        if should_cancel():
            raise CompressionCancelledError("cancelled while downloading")

    def on_step(share: float) -> None:
        channel.send(Transferred(share=share))

    send_outcome(channel, lambda: _download(request, on_step, check))


def _download(request: "FetchRequest", on_step: Callable[[float], None], check: Callable[[], None]) -> "Downloaded":
    from rocket_core.checkpoint.download import download_model
    from rocket_core.hub.repository import HubAccess
    from rocket_core.system.energy import EnergyMeter
    from worker.confined.messages import Downloaded

    meter = EnergyMeter() if request.measure_energy else None
    access = HubAccess(token=request.token, cache=request.cache, quota_bytes=request.quota_bytes)
    began = time.monotonic()
    with meter or nullcontext():
        source = download_model(
            request.model, request.revision, hub=access, config=request.config, on_step=on_step, check=check
        )
        cost = _cost(time.monotonic() - began, meter)
    assert source.commit is not None
    return Downloaded(folder=source.folder, commit=source.commit, cost=cost)


def _cost(seconds: float, meter: "EnergyMeter | None") -> "StageReport":
    from rocket_core.report.schema import StageEnergy, StageReport

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reading = None if meter is None else meter.reading()
    energy = None
    if reading is not None:
        energy = StageEnergy(
            processor_kwh=reading.processor_kwh,
            memory_kwh=reading.memory_kwh,
            accelerator_kwh=None,
            processor_counted=reading.processor_counted,
        )
    return StageReport(
        name=_STAGE,
        seconds=round(seconds, 3),
        peak_memory_bytes=peak if sys.platform == "darwin" else peak * 1024,
        energy=energy,
    )


if __name__ == "__main__":
    main(run)
