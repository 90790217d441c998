"""Folders of one job on this machine, and which of its processes may write to them.

work/<key>/        only the attempt writes here
├── empty/         working directory of all processes
├── upload-<id>.*  text uploaded by the tenant
├── earlier/       artifact of the job that this one works on
├── upload/NAME/   model uploaded by the tenant
├── hub/           model downloaded with the job's own token; `worker.confined.fetch` writes here
├── home/, tmp/    home and temporary files of one process, empty at its start
├── help-NAME/     those of a worker that helps with the job
└── out/           checkpoints and artifacts; `worker.confined.compute` writes here
"""

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from app.shared.storage.store import storage_errors


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFolders:
    """The folders of one job.

    Attributes:
        root: the folder that contains them.
        helper: name of the worker that helps with the job; empty for the attempt at it.
    """

    root: Path
    helper: str = ""

    @property
    def output(self) -> Path:
        """Checkpoints and artifacts."""
        return self.root / "out"

    @property
    def earlier(self) -> Path:
        """Artifact of the job that this one works on."""
        return self.root / "earlier"

    @property
    def hub(self) -> Path:
        """Downloads made with the job's own token."""
        return self.root / "hub"

    @property
    def uploaded(self) -> Path:
        """Copy of the tenant's model, in a folder with the model's name."""
        return self.root / "upload"

    @property
    def home(self) -> Path:
        """Home of one process."""
        return self.own / "home"

    @property
    def temporary(self) -> Path:
        """Temporary files of one process."""
        return self.own / "tmp"

    @property
    def own(self) -> Path:
        """Folder for what no other worker uses."""
        return self.root / f"help-{self.helper}" if self.helper else self.root

    def prepare(self) -> None:
        """Create the folders that the next process needs; empty its home and its folder for temporary files.

        Raises:
            DiskFullError: the disk is full.
            StorageError: the folders cannot be created.
        """
        with storage_errors(self.root):
            self.own.mkdir(exist_ok=True)
            for folder in (self.home, self.temporary):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            self.output.mkdir(exist_ok=True)

    def share(self, writable: Iterable[Path], user: int) -> None:
        """Let a process of another user write to folders; what it creates there belongs to the same group.

        Args:
            writable: the folders.
            user: the user, whose group this process is in.

        Raises:
            StorageError: they cannot be shared, for instance because another user owns them.
        """
        modes = {self.root.parent: 0o710, self.root: 0o750, self.own: 0o750} | dict.fromkeys(writable, 0o2770)
        for folder, mode in modes.items():
            with storage_errors(folder):
                os.chown(folder, -1, user)
                folder.chmod(mode)
