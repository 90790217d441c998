"""Bringing the model here, with progress and a way out while its bytes arrive."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from rocket_core.checkpoint import ModelSource, Transfer, find_model
from rocket_core.hub import HubAccess
from rocket_core.pipeline.progress import Monitor

# How often it is looked whether bytes have arrived, and whether the run shall end.
_LOOK_SECONDS = 0.5


def obtain_model(model: str, revision: str | None, hub: HubAccess, ratio: float, monitor: Monitor) -> ModelSource:
    """Finds a model, and downloads it if it is on the Hub.

    The Hub is asked in another thread, so that a name server or a Hub that hangs keeps nobody from ending the run.

    Args:
        model: path of a folder, or repository id.
        revision: branch, tag or commit of a repository.
        hub: as whom the Hub is asked, and where downloads are kept.
        ratio: target compression ratio, [0, 1).
        monitor: told of the progress.

    Raises:
        RocketError: see `find_model`.
        CompressionCancelledError: the caller wants the run to end.
    """
    if Path(model).expanduser().is_dir():
        return find_model(model, revision)
    transfer = Transfer()
    with monitor.stage("downloading"):
        pool = ThreadPoolExecutor(1, thread_name_prefix="download")
        try:
            found = pool.submit(find_model, model, revision, hub=hub, ratio=ratio, transfer=transfer)
            _watch(found, transfer, monitor)
            return found.result()
        finally:
            transfer.stop()
            pool.shutdown(wait=False)


def _watch(found: Future[ModelSource], transfer: Transfer, monitor: Monitor) -> None:
    arrived = 0
    while not wait((found,), timeout=_LOOK_SECONDS).done:
        monitor.check()
        # No bytes, no progress: whoever watches for a standstill must see one.
        if transfer.done > arrived:
            arrived = transfer.done
            monitor.step(transfer.share)
