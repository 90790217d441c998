"""Downloading a model in another thread, with progress and cancellation while its bytes arrive. Loads no torch."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from rocket_core.checkpoint.source import ModelSource, find_model
from rocket_core.checkpoint.transfer import Transfer
from rocket_core.config import CompressionConfig
from rocket_core.hub.repository import HubAccess

# How often progress is reported and `check` is called.
_LOOK_SECONDS = 0.5


def download_model(
    model: str,
    revision: str | None,
    *,
    hub: HubAccess,
    config: CompressionConfig,
    on_step: Callable[[float], None],
    check: Callable[[], None],
) -> ModelSource:
    """Find a model on the Hub and download it.

    The Hub is accessed in another thread, so that a name server or a Hub that hangs does not keep the caller from
    stopping.

    Args:
        model: repository id.
        revision: branch, tag or commit.
        hub: credentials and cache directory for Hub access.
        config: the compression that the model's headers must allow.
        on_step: called with the share of bytes that have arrived, [0, 1], whenever it has grown.
        check: called repeatedly; stops the download by raising.

    Raises:
        RocketError: see `find_model`; any exception raised by `check` is propagated as well.
    """
    transfer = Transfer()
    pool = ThreadPoolExecutor(1, thread_name_prefix="download")
    try:
        download = pool.submit(find_model, model, revision, hub=hub, config=config, transfer=transfer)
        _watch(download, transfer, on_step, check)
        return download.result()
    finally:
        transfer.stop()
        pool.shutdown(wait=False)


def _watch(
    download: Future[ModelSource], transfer: Transfer, on_step: Callable[[float], None], check: Callable[[], None]
) -> None:
    arrived = 0
    while not wait((download,), timeout=_LOOK_SECONDS).done:
        check()
        # Report progress only when new bytes have arrived, so that a watchdog can detect a stalled download.
        if transfer.done > arrived:
            arrived = transfer.done
            on_step(transfer.share)
