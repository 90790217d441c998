"""The model of a run: a local folder, or a download from the Hub."""

from pathlib import Path

from rocket_core.checkpoint import ModelSource, find_model
from rocket_core.checkpoint.download import download_model
from rocket_core.config import CompressionConfig
from rocket_core.hub.repository import HubAccess
from rocket_core.pipeline.progress import Monitor


def obtain_model(
    model: str, revision: str | None, hub: HubAccess, config: CompressionConfig, monitor: Monitor
) -> ModelSource:
    """Find a model, and download it if it is on the Hub.

    Args:
        model: path of a folder, or repository id.
        revision: branch, tag or commit of a repository.
        hub: credentials and cache directory for Hub access.
        config: the compression that the model's headers must allow.
        monitor: notified of the progress.

    Raises:
        RocketError: see `find_model`.
        CompressionCancelledError: the caller has cancelled the run.
    """
    if Path(model).expanduser().is_dir():
        return find_model(model, revision)
    with monitor.stage("downloading"):
        return download_model(model, revision, hub=hub, config=config, on_step=monitor.step, check=monitor.check)
