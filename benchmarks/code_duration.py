"""Processor time of profiling layers with codes and of storing them, next to what estimates count.

Layers are random, with Gram matrices whose spectrum falls by e^8, on one thread. A ratio above 1 is an estimate that is
too long. With `--fit`, more shapes are measured, which takes about ten minutes, and the costs that repeat them with the
least squares of relative errors are printed, to replace those of `rocket_core.estimates.code_duration`.

    python -m benchmarks.code_duration [--shape 1024x1024 ...] [--fit]
"""

import argparse
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rocket_core.config import CompressionConfig, compression_config
from rocket_core.estimates.code_duration import CodeWork, CodeWorkName, LayerCost, codes_work, profile_work
from rocket_core.linalg.whitening import GramStatistics
from rocket_core.methods import LayerProblem, method_for
from rocket_core.sizes.budget import Shape
from rocket_core.system.machine_speed import MachineSpeed, measure_speed

SHAPES = ((192, 512), (512, 192), (1024, 1024), (1024, 4096))
# All block types fit multiples of 256, those of MLX and the small ones of llama.cpp multiples of 32.
_FITTED = (
    *itertools.product((192, 256, 576, 1024, 1536), (64, 512, 2048)),
    *((192, 8192), (1024, 8192), (2048, 512), (2048, 2048), (4096, 64), (4096, 1024)),
)
# Compiled for both kinds of block types.
_WARM_UP = ((192, 64), (256, 64))
TARGETS = {
    "file": {},
    "memory": {"storage": "memory"},
    "vllm": {"engine": "vllm"},
    "llama.cpp": {"engine": "llama.cpp"},
    "mlx": {"engine": "mlx"},
}
_BITS = 4
_STORED = {"file": "entropy_coded"}
# A layer is measured until that takes so many seconds, but not more often.
_SECONDS, _MOST_TIMES = 2, 3
# What each work is taken to spend: formats of fixed bits are profiled on a sample of the outputs.
_PROFILE = ("cubes", "sampled", "whole", "passes", "seconds")
_SAMPLE = ("cubes", "sampled", "sampled_passes", "seconds")
_CODES = ("cubes", "whole", "passes", "seconds")
_TERMS: dict[CodeWorkName, tuple[str, ...]] = {
    "profile_in_file": _PROFILE,
    "profile_in_memory": _PROFILE,
    "profile_formats": _SAMPLE,
    "profile_blocks": _SAMPLE,
    "entropy": _CODES,
    "fixed": _CODES,
    "small": _CODES,
    "large": _CODES,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Processor time that was needed for a layer.

    Attributes:
        work: what was done.
        shape: `(d_in, d_out)`.
        seconds: the time.
    """

    work: CodeWork
    shape: Shape
    seconds: float

    def compared(self, speed: MachineSpeed) -> str:
        """Return the estimated and the measured time, and their ratio."""
        counted = self.work.of(self.shape).duration(speed)
        return f"{self.work.name} {counted:.3f} s, measured {self.seconds:.3f} s ({counted / self.seconds:.2f})"


def random_problem(shape: Shape, seed: int = 0) -> LayerProblem:
    """Return a layer with random weights and inputs."""
    d_in, d_out = shape
    generator = torch.Generator().manual_seed(seed)
    rotation, _ = torch.linalg.qr(torch.randn(d_in, d_in, generator=generator))
    inputs = torch.randn(2 * d_in, d_in, generator=generator) * torch.exp(-torch.linspace(0, 4, d_in)) @ rotation
    gram = (inputs.T @ inputs).double()
    return LayerProblem(
        weight=torch.randn(d_in, d_out, generator=generator) * d_in**-0.5,
        statistics=GramStatistics(tokens=2 * d_in, gram=gram, output_gram=None, input_energy=gram.diagonal()),
        shrinkage=0.05,
        precision=torch.float32,
        output_weights=torch.rand(d_out, generator=generator).double() + 0.1,
    )


def _once(problem: LayerProblem, config: CompressionConfig, kind: str) -> tuple[float, float]:
    """Return the processor time to profile a layer, and to store it in about 4 bits per weight."""
    method = method_for(config, 2)
    began = time.process_time()
    candidates = method.profile(problem)
    profiled = time.process_time() - began
    size = problem.shape[0] * problem.shape[1] * _BITS / 8
    stored = (candidate for candidate in candidates if candidate.kind == kind)
    chosen = min(stored, key=lambda candidate: abs(candidate.stored_bytes - size))
    # Prepares its Gram matrix again, as the layers of a run do.
    again = replace(problem, prepared=None)
    began = time.process_time()
    method.compress(again, chosen)
    return profiled, time.process_time() - began


def measure(problem: LayerProblem, target: str) -> tuple[Measured, Measured]:
    """Measure a layer's profile and its codes, the least of a few times, as others were disturbed."""
    config, shape = compression_config(target_bytes=2**40, **TARGETS[target]), problem.shape
    times: list[tuple[float, float]] = []
    while len(times) < _MOST_TIMES and sum(map(sum, times)) < _SECONDS:
        times.append(_once(replace(problem, prepared=None), config, _STORED.get(target, "quantized")))
    works = profile_work(shape, config), codes_work(shape, config)
    profiled, stored = (
        Measured(work=work, shape=shape, seconds=min(found))
        for work, found in zip(works, zip(*times, strict=True), strict=True)
    )
    return profiled, stored


def measure_all(shapes: Sequence[Shape], speed: MachineSpeed) -> Iterator[Measured]:
    """Measure layers of all shapes for all targets, after the kernels are compiled, and print each."""
    for shape in _WARM_UP:
        for target in TARGETS:
            measure(random_problem(shape), target)
    for shape in shapes:
        problem = random_problem(shape)
        for target in TARGETS:
            found = measure(problem, target)
            parts = [each.compared(speed) for each in found]
            print(f"{target:10} {shape[0]} x {shape[1]}: {'; '.join(parts)}", flush=True)
            yield from found


def fitted(measured: Sequence[Measured], terms: Sequence[str], speed: MachineSpeed) -> tuple[LayerCost, np.ndarray]:
    """Return the cost with the least squares of relative errors, and its ratios of estimated to measured times.

    Terms whose constant would be negative are left out, the least first.
    """
    columns = [
        [LayerCost(**{term: 1.0}).of(each.shape, each.work.formats).duration(speed) / each.seconds for each in measured]
        for term in terms
    ]
    parts = np.array(columns).T
    constants = np.linalg.lstsq(parts, np.ones(len(measured)), rcond=None)[0]
    if constants.min() < 0:
        least = int(constants.argmin())
        return fitted(measured, [*terms[:least], *terms[least + 1 :]], speed)
    cost = {term: float(f"{constant:.3g}") for term, constant in zip(terms, constants, strict=True)}
    return LayerCost(**cost), parts @ constants


def main(shapes: Sequence[Shape], *, fits: bool) -> None:
    """Print one line for each target and shape, and the costs that fit them best."""
    torch.set_num_threads(1)
    speed = measure_speed()
    by_name: dict[CodeWorkName, list[Measured]] = defaultdict(list)
    for each in measure_all(shapes, speed):
        by_name[each.work.name].append(each)
    for name, terms in _TERMS.items() if fits else ():
        cost, ratios = fitted(by_name[name], terms, speed)
        constants = ", ".join(f"{term}={getattr(cost, term):g}" for term in terms if getattr(cost, term))
        print(f'    "{name}": LayerCost({constants}),  # {ratios.min():.2f} to {ratios.max():.2f}')


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="d_in x d_out, such as 512x512; may be repeated")
    parser.add_argument("--fit", action="store_true", help="print costs that fit a larger number of shapes")
    given = parser.parse_args()
    asked = [(int(d_in), int(d_out)) for d_in, d_out in (one.split("x") for one in given.shape or ())]
    main(asked or (_FITTED if given.fit else SHAPES), fits=given.fit)
