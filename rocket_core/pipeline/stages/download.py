"""The model of a run: a local folder, a download from the Hub, or a checkpoint that is made from a GGUF file."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rocket_core.checkpoint import ModelSource, find_model
from rocket_core.checkpoint.download import download_model
from rocket_core.config import CompressionConfig
from rocket_core.exports.gguf_checkpoint import write_gguf_checkpoint
from rocket_core.hub.repository import HubAccess
from rocket_core.hub.requests import has_no_revision
from rocket_core.inspection.checks.feasibility import may_be_needless
from rocket_core.inspection.files.model_advice import is_gguf_file
from rocket_core.pipeline.progress import Monitor
from rocket_core.sizes.reachability import nothing_to_do

# Within the output folder, while the run lasts.
_ORIGINAL = ".rocket-original"


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


@contextmanager
def open_original(
    model: str | ModelSource,
    output: Path,
    revision: str | None,
    hub: HubAccess,
    config: CompressionConfig,
    monitor: Monitor,
) -> Iterator[ModelSource]:
    """Yield a model, after downloading it if it is on the Hub, or turning a GGUF file into a checkpoint.

    Args:
        model: path of a folder or of a GGUF file, repository id, or a model that was found.
        output: the output folder, in which the checkpoint of a GGUF file is kept until the end.
        revision: branch, tag or commit of a repository.
        hub: credentials and cache directory for Hub access.
        config: the compression that the model's headers must allow.
        monitor: notified of the progress.

    Raises:
        RocketError: see `find_model` and `write_gguf_checkpoint`.
        InvalidConfigError: a GGUF file is not larger than the size that is asked for.
        CompressionCancelledError: the caller has cancelled the run.
    """
    if isinstance(model, ModelSource):
        yield model
        return
    path = Path(model).expanduser()
    if not is_gguf_file(path):
        yield obtain_model(model, revision, hub, config, monitor)
        return
    if revision is not None:
        raise has_no_revision(path, revision)
    _check_smaller(path, config)
    with _original_of(path, output, monitor) as source:
        yield source


def _check_smaller(file: Path, config: CompressionConfig) -> None:
    """Raise an error if a GGUF file is no larger than the size asked for, and the result is for Rocket's own format."""
    size, asked = file.stat().st_size, config.target_bytes
    if asked is not None and asked >= size and may_be_needless(config, is_coded=True):
        raise nothing_to_do(size)


@contextmanager
def _original_of(file: Path, output: Path, monitor: Monitor) -> Iterator[ModelSource]:
    """Yield the checkpoint that is made from a GGUF file, and remove it at the end."""
    folder, is_new = output / _ORIGINAL, not output.exists()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with monitor.stage("preflight"):
            stored = write_gguf_checkpoint(file, folder, on_tensor=lambda _key: monitor.check())
        monitor.observer.on_warning(
            f"{file.name} is already quantized ({stored}): errors of that remain, and are not in the measured quality; "
            "ratios count against its weights in 16 bits. Better start from the original checkpoint"
        )
        yield ModelSource(name=file.name, folder=folder.resolve(), commit=None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if is_new:
            with suppress(OSError):
                output.rmdir()
