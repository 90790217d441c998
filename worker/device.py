"""Process that checks that a device computes, before a worker takes jobs: `python -m worker.device KIND`.

It is a separate process because the worker never loads torch, and because a hanging driver must not block the worker.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal

from pydantic import ValidationError

from app.shared.errors import InvalidSettingsError
from app.shared.requests import Queue
from rocket_core.schema import FrozenModel

Kind = Literal["cpu", "cuda"]
"""Kind of device; `cuda` is every GPU that torch drives under that name."""

KINDS: Mapping[Queue, Kind] = {"cpu": "cpu", "gpu": "cuda"}
QUEUES: Mapping[Kind, Queue] = {kind: queue for queue, kind in KINDS.items()}

DEVICE_PROGRAM = ("-m", "worker.device")

# Enough for a cold start of torch from a slow disk, and of the driver.
_PROBE_SECONDS = 180.0
_LOOK_SECONDS = 0.1
_SIZE = 256
_log = logging.getLogger(__name__)


class DeviceProof(FrozenModel):
    """Outcome of a matrix product on a device."""

    kind: Kind
    """kind of the device."""
    name: str = ""
    """its model name, or the number of threads of a CPU."""
    fault: str | None = None
    """why it cannot be used; None if it computes."""


def device_environment(kind: Kind) -> dict[str, str]:
    """Return variables for a process that uses this kind of device; on the CPU they hide all GPUs."""
    return {"CUDA_VISIBLE_DEVICES": ""} if kind == "cpu" else {}


def prove_device(
    queue: Queue | None,
    *,
    should_stop: Callable[[], bool],
    program: Sequence[str] = DEVICE_PROGRAM,
    seconds: float = _PROBE_SECONDS,
) -> DeviceProof | None:
    """Check in a child process the device that a queue's jobs run on.

    Args:
        queue: the queue; None tries a GPU first, then the CPU.
        should_stop: called repeatedly; True ends the check.
        program: interpreter arguments of the check.
        seconds: timeout after which a device counts as unusable.

    Returns:
        The device; None if `should_stop` returned True.

    Raises:
        InvalidSettingsError: the device cannot be used.
    """
    for kind in (KINDS[queue],) if queue is not None else (KINDS["gpu"], KINDS["cpu"]):
        proof = _probe(kind, should_stop, program, seconds)
        if proof is None or proof.fault is None:
            return proof
        _log.info("the device %s cannot be used: %s", kind, proof.fault)
    assert proof is not None
    if proof.kind == "cpu":
        raise InvalidSettingsError(f"this machine cannot run jobs: {proof.fault}")
    raise InvalidSettingsError(
        f"the queue gpu needs a working CUDA device: {proof.fault}; check `nvidia-smi` and "
        "CUDA_VISIBLE_DEVICES, or use the queue cpu"
    )


def _probe(kind: Kind, should_stop: Callable[[], bool], program: Sequence[str], seconds: float) -> DeviceProof | None:
    child = subprocess.Popen(  # noqa: S603  # our own interpreter and module
        [sys.executable, "-P", *program, kind],
        env={**os.environ, **device_environment(kind)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    until = time.monotonic() + seconds
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                output, _ = child.communicate(timeout=_LOOK_SECONDS)
                return _judge(kind, output, child.returncode)
            if should_stop():
                return None
            if time.monotonic() > until:
                return DeviceProof(kind=kind, fault=f"it did not compute a matrix product within {seconds:g} seconds")
    finally:
        child.kill()
        child.communicate()


def _judge(kind: Kind, output: bytes, exit_code: int) -> DeviceProof:
    with suppress(ValidationError, IndexError):
        return DeviceProof.model_validate_json(output.splitlines()[-1])
    return DeviceProof(kind=kind, fault=f"the process that checked it ended with exit code {exit_code}; see the log")


def _prove(kind: Kind) -> DeviceProof:
    try:
        import torch
    except ImportError as error:
        return DeviceProof(kind=kind, fault=f"{error}; install it with: pip install 'rocket-compress[worker]'")
    if kind == "cuda" and not torch.cuda.is_available():
        return DeviceProof(kind=kind, fault="torch finds no CUDA device")
    try:
        ones = torch.ones(_SIZE, _SIZE, device=kind)
        total = float((ones @ ones).sum())
    except RuntimeError as error:
        reason = str(error).strip().split("\n", 1)[0]
        return DeviceProof(kind=kind, fault=f"a matrix product fails: {reason}")
    if total != _SIZE**3:
        return DeviceProof(kind=kind, fault=f"a matrix product is wrong: {total} instead of {_SIZE**3}")
    name = torch.cuda.get_device_name() if kind == "cuda" else f"{torch.get_num_threads()} threads"
    return DeviceProof(kind=kind, name=name)


def main(arguments: Sequence[str]) -> int:
    """Check the named device and print a `DeviceProof` as one line of JSON."""
    [kind] = [kind for kind in KINDS.values() if kind in arguments]
    sys.stdout.write(_prove(kind).model_dump_json() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
