from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rocket_core.pipeline.devices import processes
from rocket_core.pipeline.state.work_folder import WorkFolder
from tests.reference import device_processes

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def leave(monkeypatch):
    """Make this process leave blocks to the other one, as long as a condition holds."""

    def leave(blocks, while_true=lambda: True):
        original = WorkFolder.lock_block

        @contextmanager
        def lock_block(work, stage, block):
            if block in blocks and while_true():
                yield False
                return
            with original(work, stage, block) as is_ours:
                yield is_ours

        monkeypatch.setattr(WorkFolder, "lock_block", lock_block)

    return leave


@pytest.fixture
def fate(monkeypatch):
    """Choose what happens to the other process."""

    def fate(name):
        monkeypatch.setattr(processes, "PROGRAM", device_processes.NAME)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("ROCKET_TEST_FATE", name)

    return fate
