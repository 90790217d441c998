"""Speed of this machine's processors in matrix products, without torch: numpy multiplies float32 as fast as it does."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from rocket_core.system.torch_environment import thread_count

# How many times as fast processors with these instructions multiply bfloat16 matrices; measured on one with tiles, and
# on an AMD EPYC (Zen 5) with vector instructions only.
_BFLOAT16_FLAGS, _BFLOAT16_GAIN = ("amx_bf16", "avx512_bf16"), 4.0
# Results are mostly written to fresh memory, which takes about twice as long. It is not measured: while other programs
# fill the memory, it can take twenty times as long.
_FRESH_SPEED = 0.52
_SIDE = 1024
_LEAST_SECONDS = 0.1
# On a machine that others keep busy.
_MOST_SECONDS = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineSpeed:
    """Speed of a machine that computes.

    Attributes:
        products: operations per second in products of float32 matrices.
        rough_products: the same in products of bfloat16 matrices, where these are faster; else that of float32.
        memory: bytes per second that elementwise operations read.
    """

    products: float
    rough_products: float
    memory: float


@cache
def measure_speed() -> MachineSpeed:
    """Measure the speed of this machine's processors, once; takes half a second.

    It is that of idle processors, as it is measured in the processor time of another process, which also takes the
    memory of numpy and of its matrices.
    """
    command = [sys.executable, "-P", "-m", __name__]
    measured = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_MOST_SECONDS)  # noqa: S603 - the command is fixed
    return MachineSpeed(**json.loads(measured.stdout))


def has_accelerator(devices: Path = Path("/dev")) -> bool:
    """Return whether the system has a GPU for computing, whose speed is not known here."""
    return any((devices / name).exists() for name in ("nvidiactl", "kfd"))


def _least_seconds(work: Callable[[], object]) -> float:
    """Return the least processor time of a call: others were disturbed."""
    work()
    times: list[float] = []
    while sum(times) < _LEAST_SECONDS:
        at = time.process_time()
        work()
        times.append(time.process_time() - at)
    return min(times)


def bfloat16_gain(proc: Path = Path("/proc")) -> float:
    """Return how many times as fast this machine multiplies bfloat16 matrices, by the flags of its processors."""
    try:
        flags = (proc / "cpuinfo").read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return 1.0
    return _BFLOAT16_GAIN if any(flag in flags for flag in _BFLOAT16_FLAGS) else 1.0


def _measured() -> MachineSpeed:
    import numpy as np  # only this process needs it

    left, right = (np.full((_SIDE, _SIDE), value, dtype=np.float32) for value in (0.5, 2.0))
    output = np.empty_like(left)
    products = thread_count(os.environ) * 2 * _SIDE**3 / _least_seconds(lambda: np.matmul(left, right, out=output))
    # As large as what passes between layers, which caches hold; beyond them a processor can take twice as long.
    states = np.ones((2 * _SIDE, _SIDE), dtype=np.float32)
    sums = np.empty_like(states)
    memory = _FRESH_SPEED * states.nbytes / _least_seconds(lambda: np.add(states, states, out=sums))
    return MachineSpeed(products=products, rough_products=products * bfloat16_gain(), memory=memory)


if __name__ == "__main__":
    json.dump(asdict(_measured()), sys.stdout)
