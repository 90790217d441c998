"""Runs that a process helps which they have not started, here one on the same machine."""

import multiprocessing
import os
import signal
import threading

import pytest
import torch

from rocket_core.checkpoint import find_model
from rocket_core.errors import CompressionCancelledError, InsufficientMemoryError
from rocket_core.pipeline import compress, requirements
from rocket_core.pipeline.devices import helping, offers
from rocket_core.pipeline.devices.helping import help_run
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.system.files import locked
from tests.reference.observers import Watch
from tests.sampling import sweep

BYTES = {"preset": "fast", "ratio": None, "sensitivity_samples": 4, "target_bytes": 120_000, "export": ("rocket",)}
CASES = {"entropy-coded": BYTES, "factors": {}}
HANGS = 0


@pytest.fixture
def helper(tmp_path, model_folder):
    """Start processes that help the run in `out`; they are killed at the end."""
    started = []

    def start(target=help_run):
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=target, args=(find_model(str(model_folder("llama"))), tmp_path / "out"))
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.fixture
def until_helped(monkeypatch):
    """Leave a block to the helper until it has taken it, however long that takes to start."""

    def until_helped(block, take):
        original = WorkFolder.lock_block

        def lock_block(work, stage, index):
            if index == block:
                take(work, stage)
            return original(work, stage, index)

        monkeypatch.setattr(WorkFolder, "lock_block", lock_block)

    return until_helped


def is_done(work, stage):
    return work.block(1) is not None if stage == "profile" else any((work.path / "outcomes").glob("*.1.*"))


def waiting(condition, seconds=120.0):
    ended = threading.Event()
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        ended.wait(0.05)
    raise AssertionError("no helper took the block")


@pytest.mark.parametrize("case", sweep([*CASES][:1], soak=[*CASES][1:]))
def test_a_helped_run_writes_the_bytes_of_one_alone(
    case, tmp_path, model_folder, settings, fingerprint, helper, until_helped
):
    model = str(model_folder("llama"))
    compress(model, tmp_path / "alone", settings(**CASES[case]))
    until_helped(1, lambda work, stage: waiting(lambda: is_done(work, stage)))
    process = helper()

    report = compress(model, tmp_path / "out", settings(**CASES[case]))

    process.join(60)
    assert process.exitcode == 0
    assert fingerprint(tmp_path / "out") == fingerprint(tmp_path / "alone")
    devices = {stage.name: stage.device for stage in report.stages}
    assert devices["calibrating"].startswith("2 x ")
    assert devices["factorizing"].startswith("2 x ")
    assert not devices["exporting"].startswith("2 x ")


@pytest.mark.parametrize("number", sweep([signal.SIGKILL], soak=[signal.SIGSTOP, HANGS]))
def test_what_a_lost_helper_left_is_done(
    number, tmp_path, model_folder, settings, finished, fingerprint, helper, until_helped, monkeypatch
):
    monkeypatch.setattr(offers, "PATIENCE_SECONDS", 2.0)
    lost = []

    def lose(work, stage):
        waiting(lambda: lost or is_held(work, stage))
        if not lost:
            os.kill(process.pid, number)
            lost.append(number)

    until_helped(1, lose)
    process = helper(help_slowly)

    report = compress(str(model_folder("llama")), tmp_path / "out", settings())

    assert lost
    assert fingerprint(tmp_path / "out") == fingerprint(finished("llama")[0])
    assert not any(stage.device.startswith("2 x ") for stage in report.stages if stage.device)


def test_a_helper_that_is_stopped_ends(tmp_path, model_folder):
    stop = iter([False, False, True])

    with pytest.raises(CompressionCancelledError):
        help_run(
            find_model(str(model_folder("llama"))), tmp_path / "out", observer=Watch(should_cancel=lambda: next(stop))
        )


def test_a_helper_with_too_little_memory_says_so(tmp_path, model_folder, settings, monkeypatch):
    model = str(model_folder("llama"))
    refused = []

    def join(_run):
        monkeypatch.setattr(requirements, "free_memory", lambda device: 1)
        with pytest.raises(InsufficientMemoryError):
            help_run(find_model(model), tmp_path / "out")
        refused.append(True)

    watch = Watch(on_profile=lambda position, profile: refused or join(profile))
    compress(model, tmp_path / "out", settings(), observer=watch)
    assert refused


def is_held(work, stage):
    try:
        with locked(work.path / "locks" / f"{stage}-00001"):
            return False
    except BlockingIOError:
        return True


def help_slowly(model, output):
    """Help, and stay with the second block for long."""
    torch.set_num_threads(1)
    helping.work_on_blocks = _slowly
    help_run(model, output)


def _slowly(run, inputs, work, request, observer):
    with work.lock_block(request.kind, 1):
        threading.Event().wait(600)
