"""The folders of one job on this machine: which of its processes may write where.

work/<key>/        nothing but the attempt writes here
├── empty/         working directory of all processes
├── upload-<id>.*  text that the tenant has uploaded
├── hub/           a model that was fetched with the job's own token; `worker.fetch` writes here
├── home/, tmp/    of one process, empty at its start
└── out/           checkpoints and artifacts; `worker.compute` writes here
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from app.shared.errors import StorageError


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFolders:
    """The folders of one job.

    Attributes:
        root: the folder around them.
    """

    root: Path

    @property
    def output(self) -> Path:
        """Checkpoints and artifacts."""
        return self.root / "out"

    @property
    def hub(self) -> Path:
        """What is fetched with the job's own token."""
        return self.root / "hub"

    @property
    def home(self) -> Path:
        """Home of one process."""
        return self.root / "home"

    @property
    def temporary(self) -> Path:
        """Temporary files of one process."""
        return self.root / "tmp"

    def prepare(self) -> None:
        """Make the folders that the next process needs; what the last one has left in its own goes.

        Raises:
            StorageError: they cannot be made.
        """
        try:
            for folder in (self.home, self.temporary):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            self.output.mkdir(exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot use {self.root}: {error.strerror or error}") from error
