"""Cache on disk of the tensors between two blocks, which a pass over the blocks in reverse reads back."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from torch import Tensor

from rocket_core.checkpoint import TensorEntry
from rocket_core.pipeline.state.files import tensor_entries, write_tensors

StateKind = Literal["hidden", "gradients", "added"]


class StateCache:
    """Hidden states and gradients at the input of blocks; the output of the last one counts as one more input.

    `added` are gradients with respect to what the model adds to the output of a block, by index of that block.

    Each file is written atomically.

    Args:
        folder: folder of the files; created by the first `save`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, kind: StateKind, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Store the tensors at the input of block `index`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_tensors(self._file(kind, index), tensors)

    def entries(self, kind: StateKind, index: int) -> dict[str, TensorEntry]:
        """Return the locations of the tensors at the input of block `index`, to read them one by one."""
        return tensor_entries(self._file(kind, index))

    def indices(self, kind: StateKind) -> list[int]:
        """Return the blocks whose input is stored, ascending."""
        return sorted(int(file.stem.removeprefix(f"{kind}-")) for file in self._folder.glob(f"{kind}-*.safetensors"))

    def drop(self, kind: StateKind, index: int) -> None:
        """Remove the tensors at the input of block `index`, if they are stored."""
        self._file(kind, index).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove everything."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _file(self, kind: StateKind, index: int) -> Path:
        return self._folder / f"{kind}-{index:05}.safetensors"
