"""Time of a compression on GPUs, computed from what the simulated device counts; nothing is measured.

    python -m benchmarks.device_time [--model llama-3.2-1b ...] [--target ratio=0.5 ...]

A block with all its lengths divided, those of the text too, is compressed on the simulated device, with the constants
of the library that are lengths divided as well. It launches, waits and branches as the real block does; its operations
and bytes are multiplied by the powers of the divisor. A launch takes as long as the host needs for it, or the device,
whichever is longer. The table says what limits each stage, and how long all blocks of the model take; start, embedding
and head are left out. Experts are extrapolated from few. `make bench-gpu` measures what this computes.
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import torch

from benchmarks.device_counts import SCALES, round_as_on_gpus
from benchmarks.scale.operations import FACTORIZATIONS, product_of, sides_of
from benchmarks.scale.shapes import SIZES, ModelSize
from benchmarks.scale.weights import make_model
from rocket_core.calibration import grams
from rocket_core.config import compression_config
from rocket_core.layers import code_stream
from rocket_core.linalg import pruning, rounding
from rocket_core.linalg.kernels import on_gpu, reference
from rocket_core.methods import layer_problem, sampled_outputs, sparse
from rocket_core.pipeline import Observer, Progress, compress
from tests.reference import simulated_device

_TOKENIZER = Path(__file__).parents[1] / "examples" / "tiny-llama"
_DIVISORS = {"llama-3.3-70b": 16}
_DIVISOR, _WINDOW, _WINDOWS, _VOCABULARY = 8, 1024, 8, 2048
_EXPERTS = (4, 8)
# Constants of the library by the power of a length that they are.
_CONSTANTS: Mapping[int, Mapping[Any, Sequence[str]]] = {
    1: {
        on_gpu: ["BLOCK"],
        pruning: ["_WIDE_FROM"],
        rounding: ["_ROUGH_FROM"],
        sparse: ["_SAMPLED_OUTPUTS", "_ROUGHLY_SAMPLED"],
        sampled_outputs: ["_SAMPLED_OUTPUTS", "_MOST_SAMPLED", "OUTPUTS_AT_ONCE"],
        layer_problem: ["OUTPUTS_AT_ONCE"],
    },
    2: {sparse: ["_MOST_SAMPLED", "_ORDERED_SCORES"], pruning: ["_ORDERED"], reference: ["_TRIED_AT_ONCE"]},
}
# Seconds by device and stage, and by cause.
_Seconds: TypeAlias = Mapping[tuple[str, str], Mapping[str, float]]
_FLOATS = {torch.float64: 0, torch.float32: 1}
# Cholesky factors and triangular solutions reach this part of the speed of products (9 ms for 8,192 rows, H100).
_FACTOR_SPEED = 0.4
# Operations in float32 for a weight and a scale of either sign that is tried, by the instructions of the kernel.
_TRY_OPERATIONS = 100
# Operations that sort, by passes that read and write keys and places.
_SORTS, _SORTING_PASSES = {"argsort", "sort", "topk"}, 25
# Bytes in a second: that a core deflates, that are written to a disk, that pinned memory is emptied of, that a thread
# reads from files for a device.
_DEFLATED, _WRITTEN, _MOVED, _READ = 100e6, 1e9, 8e9, 1.6e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Speeds of a GPU and of its host.

    Attributes:
        products: operations of products in a second: in float64, float32, narrower dtypes, and float32 that is rounded.
        memory: bytes of its memory read or written in a second.
        up, down: bytes copied to the device from pageable memory, and from it to pinned memory.
        eigh: seconds for eigenvectors of 8,192 rows in float64 and float32, which are cubic in rows; of a row at least.
        kernel: seconds of a kernel in Triton that visits `on_gpu.BLOCK` inputs.
        cores: of the host.
        launch, wait: seconds of the host for an operation, with the Python around it, and for a value that it asks for.
    """

    products: tuple[float, float, float, float]
    memory: float
    up: float
    down: float
    eigh: tuple[float, float, float]
    kernel: float = 1e-3
    cores: int = 16
    launch: float = 25e-6
    wait: float = 13e-6


DEVICES = {
    # Measured, but for the kernel, eigenvectors in float64 and of few rows, and the bandwidth, which NVIDIA states.
    "H100": Device(
        products=(59e12, 51e12, 782e12, 406e12), memory=3.35e12, up=14e9, down=54e9, eigh=(1.1, 0.57, 25e-6)
    ),
    # Stated (NVIDIA, "Ada GPU architecture", 2023, table of the RTX 4090, dense); PCIe 4; eigenvectors by bandwidth.
    "RTX 4090": Device(
        products=(1.29e12, 82.6e12, 165e12, 82.6e12), memory=1.008e12, up=12e9, down=24e9, eigh=(6.0, 1.9, 25e-6)
    ),
}


@dataclass(kw_only=True)
class _Meter(Observer):
    """What was counted so far, in seconds."""

    divisor: int
    seconds: dict[tuple[str, str], dict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    stage: str = "preflight"
    rounds: bool = False

    @contextmanager
    def rough_products(self, _device: torch.device) -> Iterator[None]:
        """Note that float32 products are rounded."""
        self.rounds = True
        yield
        self.rounds = False

    def on_progress(self, progress: Progress) -> None:
        """Charge waits and copies to the stage that they belonged to."""
        self.close()
        self.stage = progress.stage

    def close(self) -> None:
        """Charge waits, copies and kernels in Triton since the last call."""
        counts = simulated_device.counts
        up, down = (self.divisor**2 * counts.copied_bytes[f"{way}"] for way in ("host to device", "device to host"))
        for name, device in DEVICES.items():
            self._add(name, "waits", device.wait * sum(counts.waits.values()))
            self._add(name, "copies", up / device.up + down / device.down + down / _MOVED)
            self._add(name, "files", up / _READ + down / _WRITTEN)
            self._add(name, "rounding", device.kernel * counts.operations["kernel in Triton"])
        counts.clear()

    def launched(self, name: str, args: tuple[Any, ...]) -> None:
        """Charge an operation."""
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        product, wide = product_of(name, args), max((tensor.dim() for tensor in tensors), default=0)
        size = sum(tensor.nbytes for tensor in tensors) + max((tensor.nbytes for tensor in tensors), default=0)
        place = _FLOATS.get(tensors[0].dtype, 2) if tensors else 2
        for key, device in DEVICES.items():
            cause, seconds = "memory", self.divisor ** min(wide, 2) * size / device.memory
            if name == SCALES:
                operations = self.divisor**2 * tensors[0].numel() * args[1].count * _TRY_OPERATIONS
                cause, seconds = "rounding", operations / device.products[1]
            elif name in _SORTS:
                cause, seconds = "sorting", _SORTING_PASSES * seconds
            elif "eigh" in name:
                rows = self.divisor * tensors[0].shape[-1]
                cause, seconds = "eigenvectors", max(device.eigh[place] * (rows / 8192) ** 3, device.eigh[2] * rows)
            elif product is not None:
                own = 3 if self.rounds and place == 1 else place
                cause, seconds = "products", self.divisor**3 * product.operations / device.products[own]
            elif name in FACTORIZATIONS:
                operations = self.divisor**3 * FACTORIZATIONS[name](*sides_of(args))
                cause, seconds = "factors", operations / _FACTOR_SPEED / device.products[place]
            self._add(key, *(("launches", device.launch) if seconds < device.launch else (cause, seconds)))

    def deflated(self, size: int) -> None:
        """Charge bytes that the host deflates, in parts."""
        size *= self.divisor**2
        for name, device in DEVICES.items():
            threads = max(1, min(device.cores, size // code_stream._PART))
            self._add(name, "deflating", size / _DEFLATED / threads)

    def _add(self, device: str, cause: str, seconds: float) -> None:
        self.seconds[device, self.stage][cause] += seconds


def main() -> None:
    """Print a table for each model and target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=sorted(SIZES), help="shapes; may be repeated")
    parser.add_argument("--target", action="append", help="ratio=0.5 or bits=4; may be repeated; both by default")
    given = parser.parse_args()
    simulated_device.install()
    round_as_on_gpus()
    torch.set_num_threads(1)
    for model in given.model or ["llama-3.2-1b", "qwen3-8b", "qwen3-30b-a3b", "llama-3.3-70b"]:
        size, divisor = SIZES[model], _DIVISORS.get(model, _DIVISOR)
        for target in given.target or ["ratio=0.5", "bits=4"]:
            found = _seconds(size, target, divisor)
            _print(size, target, found)


def _seconds(size: ModelSize, target: str, divisor: int) -> _Seconds:
    """Return the seconds of one block."""
    experts = int(size.settings.get("num_experts", 0))
    if experts > max(_EXPERTS):
        few, more = (_seconds(size.with_experts(count), target, divisor) for count in _EXPERTS)
        times = (experts - _EXPERTS[0]) / (_EXPERTS[1] - _EXPERTS[0])
        return {
            key: {
                cause: few[key].get(cause, 0) + times * (value - few[key].get(cause, 0)) for cause, value in own.items()
            }
            for key, own in more.items()
        }
    lengths = {"hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim"}
    divided = {name: value // divisor if name in lengths else value for name, value in size.settings.items()}
    meter, (kind, _, value) = _Meter(divisor=divisor), target.partition("=")
    calibration = {"samples": _WINDOWS, "sequence_length": _WINDOW // divisor}
    deflate = code_stream._deflated

    def deflated(packed: bytes, excess: bytes) -> bytes:
        meter.deflated(len(packed) + len(excess))
        return deflate(packed, excess)

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for power, modules in _CONSTANTS.items():
            for module, name in ((module, name) for module, names in modules.items() for name in names):
                stack.enter_context(mock.patch.object(module, name, getattr(module, name) // divisor**power))
        stack.enter_context(mock.patch.object(code_stream, "_deflated", deflated))
        for module in (pruning, grams):
            stack.enter_context(mock.patch.object(module, "rough_products", meter.rough_products))
        model = make_model(
            replace(size, settings=divided), _TOKENIZER, Path(folder) / "model", blocks=1, vocabulary=_VOCABULARY
        )
        settings = {kind: float(value), "calibration": calibration, "device": simulated_device.NAME}
        simulated_device.counts.clear()
        simulated_device.listeners.append(meter.launched)
        compress(str(model), Path(folder) / "out", compression_config(**settings, preset="fast"), observer=meter)
        meter.close()
        simulated_device.listeners.remove(meter.launched)
    return meter.seconds


def _print(size: ModelSize, target: str, found: _Seconds) -> None:
    print(f"\n{size.name}, {target}, a block of {size.blocks}:")
    for name in DEVICES:
        total = 0.0
        for (device, stage), causes in found.items():
            seconds = sum(causes.values())
            if device != name or seconds < 0.005:
                continue
            total += seconds
            shares = sorted(causes.items(), key=lambda item: -item[1])[:3]
            limits = ", ".join(f"{cause} {value / seconds:.0%}" for cause, value in shares)
            print(f"{device:9} {stage:16}{seconds:8.2f} s  {limits}")
        print(f"{name:9} {'all':16}{total:8.2f} s; {size.blocks} blocks {size.blocks * total / 60:.1f} min", flush=True)


if __name__ == "__main__":
    main()
