"""What a run will need, estimated from shapes, and whether this machine has it."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from rocket_core import budget
from rocket_core.devices import free_memory
from rocket_core.errors import InsufficientDiskError, InsufficientMemoryError
from rocket_core.pipeline.preflight import TOKENS_PER_BATCH, Run

_FLOAT64 = 8
# eigh holds its input, the vectors and two workspaces of the same size.
_EIGH_COPIES = 4
# Python, torch and allocator overhead beside the tensors that are counted.
_HEADROOM = 256 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceEstimate:
    """What a run needs at its most demanding moment.

    Attributes:
        memory_bytes: memory of the computing device.
        disk_bytes: disk for the work folder and the artifacts.
    """

    memory_bytes: int
    disk_bytes: int


def estimate_resources(run: Run, windows: int) -> ResourceEstimate:
    """Estimates memory and disk from the model's shapes.

    Memory is the hidden states of all calibration windows, and the largest of: the embeddings (twice, while they are
    read); one block's weights and Gram matrices with the activations of one batch, or with the largest
    eigendecomposition.

    Args:
        run: the run.
        windows: calibration windows.
    """
    model = run.architecture.model
    itemsize = run.dtype.itemsize
    blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in run.architecture.blocks]
    prelude = sum(parameter.numel() for parameter in model.parameters()) - sum(blocks)
    hidden = windows * run.sequence_length * int(model.config.get_text_config().hidden_size) * itemsize
    shapes = [[run.architecture.shape(name) for name in block] for block in run.layers]
    grams = max(sum(min(shape) ** 2 * _FLOAT64 for shape in block) for block in shapes)
    solver = max(_solver_bytes(*shape) for block in shapes for shape in block)
    widest = max(max(shape) for block in shapes for shape in block)
    batch = min(windows * run.sequence_length, max(TOKENS_PER_BATCH, run.sequence_length))
    activations = batch * widest * (3 * itemsize + 2 * run.precision.itemsize)
    working = max(blocks) * itemsize + grams + max(solver, activations)
    memory = max(2 * prelude * itemsize, working) + 2 * hidden + _HEADROOM
    return ResourceEstimate(memory_bytes=memory, disk_bytes=_disk_bytes(run, shapes))


def require_resources(run: Run, windows: int, output: Path, *, held: int) -> ResourceEstimate:
    """Refuses a run that this machine cannot finish.

    Args:
        run: the run.
        windows: calibration windows.
        output: the folder to write to; need not exist yet.
        held: bytes that a resumed run's work folder takes already.

    Raises:
        InsufficientMemoryError: the device has too little free memory.
        InsufficientDiskError: the disk has too little free space.
    """
    estimate = estimate_resources(run, windows)
    memory = free_memory(run.device)
    if estimate.memory_bytes > memory:
        raise InsufficientMemoryError(
            f"compressing {run.source.name} needs about {_gigabytes(estimate.memory_bytes)} of memory on {run.device}, "
            f"{_gigabytes(memory)} are free; use fewer samples, a shorter sequence length or another device"
        )
    existing = next(folder for folder in (output, *output.resolve().parents) if folder.is_dir())
    disk = shutil.disk_usage(existing).free
    if estimate.disk_bytes - held > disk:
        raise InsufficientDiskError(
            f"compressing {run.source.name} needs about {_gigabytes(estimate.disk_bytes - held)} of disk at {output}, "
            f"{_gigabytes(disk)} are free; free some, write elsewhere, export one artifact only, or lower "
            "statistics_quota_bytes"
        )
    return estimate


def _solver_bytes(d_in: int, d_out: int) -> int:
    side = min(d_in, d_out)
    eigendecomposition = _EIGH_COPIES * side**2 + 3 * d_in * d_out
    # A candidate: coefficients, support scores and two products, at the full rank.
    candidate = 3 * side * d_out + 3 * side**2 + d_in * d_out
    return (eigendecomposition + candidate) * _FLOAT64


def _disk_bytes(run: Run, shapes: list[list[tuple[int, int]]]) -> int:
    itemsize = run.dtype.itemsize
    parameters = sum(d_in * d_out for block in shapes for d_in, d_out in block)
    # No candidate keeps more than its dense layer, but its mask may add an eighth of a byte per coefficient.
    factors = budget.parameter_budget(parameters, run.config.ratio) * itemsize + parameters // 8
    bases = sum(min(shape) * (shape[1] * run.precision.itemsize + _FLOAT64) for block in shapes for shape in block)
    exports = len(run.config.export) * run.checkpoint.stored_bytes
    return min(bases, run.config.statistics_quota_bytes) + factors + exports


def _gigabytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
