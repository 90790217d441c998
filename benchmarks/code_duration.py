"""Processor time of profiling layers with codes and of storing them, next to what estimates count.

Layers are random, with Gram matrices whose spectrum falls by e^8, on one thread. A ratio above 1 is an estimate that is
too long.

    python -m benchmarks.code_duration [--shape 1024x1024 ...]
"""

import argparse
import time

import torch

from rocket_core.config import CompressionConfig, compression_config
from rocket_core.estimates.code_duration import compressing_codes, profiling_codes
from rocket_core.linalg.whitening import GramStatistics
from rocket_core.methods import LayerProblem, method_for
from rocket_core.sizes.budget import Shape
from rocket_core.system.machine_speed import measure_speed

SHAPES = ((192, 512), (512, 192), (1024, 1024), (1024, 4096))
TARGETS = {
    "file": {},
    "memory": {"storage": "memory"},
    "vllm": {"engine": "vllm"},
    "llama.cpp": {"engine": "llama.cpp"},
}
_BITS = 4
_STORED = {"file": "entropy_coded"}


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


def measure(shape: Shape, config: CompressionConfig, kind: str) -> tuple[float, float]:
    """Return the processor time to profile a layer, and to store it in about 4 bits per weight."""
    problem, method = random_problem(shape), method_for(config, 2)
    began = time.process_time()
    candidates = method.profile(problem)
    profiled = time.process_time()
    size = shape[0] * shape[1] * _BITS / 8
    stored = (candidate for candidate in candidates if candidate.kind == kind)
    method.compress(problem, min(stored, key=lambda candidate: abs(candidate.stored_bytes - size)))
    return profiled - began, time.process_time() - profiled


def main(shapes: tuple[Shape, ...] = SHAPES) -> None:
    """Print one line for each target and shape."""
    torch.set_num_threads(1)
    speed = measure_speed()
    for name, options in TARGETS.items():
        config = compression_config(target_bytes=2**40, **options)
        for shape in shapes:
            counted = [count(shape, config).duration(speed) for count in (profiling_codes, compressing_codes)]
            measured = measure(shape, config, _STORED.get(name, "quantized"))
            parts = [
                f"{what} {estimate:.2f} s, measured {seconds:.2f} s ({estimate / seconds:.2f})"
                for what, estimate, seconds in zip(("profile", "codes"), counted, measured, strict=True)
            ]
            print(f"{name:10} {shape[0]} x {shape[1]}: {'; '.join(parts)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", help="d_in x d_out, such as 512x512; may be repeated")
    asked = parser.parse_args().shape
    main(tuple((int(d_in), int(d_out)) for d_in, d_out in (one.split("x") for one in asked)) if asked else SHAPES)
