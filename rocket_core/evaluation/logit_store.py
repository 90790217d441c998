"""Logits of one model on disk, until those of another model are compared with them."""

import errno
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.errors import InsufficientDiskError, InvalidConfigError
from rocket_core.evaluation.windows import Prediction
from rocket_core.system.machine import free_disk, gibibytes


class LogitStore:
    """The logits of one model on disk, window by window, unmodified.

    Args:
        folder: folder for the files.
        tokens: most tokens whose logits are stored at the same time.
    """

    def __init__(self, folder: Path, tokens: int) -> None:
        self._folder = folder
        self._tokens = tokens
        self._kinds: dict[int, tuple[torch.dtype, torch.Size]] = {}

    def put(self, prediction: Prediction) -> None:
        """Store the logits of a window.

        Raises:
            InsufficientDiskError: the logits of all windows do not fit; raised at the first window already.
        """
        logits = prediction.logits.cpu().contiguous()
        whole = self._tokens * logits.shape[1] * logits.element_size()
        if not self._kinds and whole > free_disk(self._folder):
            raise self._too_little(whole)
        self._kinds[prediction.window] = logits.dtype, logits.shape
        try:
            self._file(prediction.window).write_bytes(logits.view(torch.uint8).numpy().data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise self._too_little(whole) from error

    def take(self, prediction: Prediction) -> Float[Tensor, "tokens vocabulary"]:
        """Return the stored logits for the same tokens, and delete them.

        Raises:
            InvalidConfigError: their vocabulary is different.
        """
        dtype, shape = self._kinds.pop(prediction.window)
        if shape != prediction.logits.shape:
            raise InvalidConfigError(
                f"the dense model predicts {shape[1]} tokens and the compressed one {prediction.logits.shape[1]}; "
                "compare a model with its own original"
            )
        file = self._file(prediction.window)
        raw = torch.frombuffer(bytearray(file.read_bytes()), dtype=dtype)
        file.unlink()
        return raw.view(shape).to(prediction.logits.device)

    def _file(self, window: int) -> Path:
        return self._folder / f"{window}.logits"

    def _too_little(self, size: int) -> InsufficientDiskError:
        return InsufficientDiskError(
            f"comparing the models takes {gibibytes(size)} of disk at {self._folder} for the dense model's "
            f"logits, {gibibytes(free_disk(self._folder))} are free; free some, or read fewer windows"
        )
