"""Profiling of a layer, compared with the explicit procedure of the paper in one run on one thread.

The reference evaluates the same 14 ratios by 21 rank/nnz ratios with an explicit mask, dictionary and reconstruction of
every candidate in float64 (`tests/reference/factorization.py`). It shares the mask rule and the exact nnz, so that the
best error at each ratio can be compared: the deviation is printed with the speed.

    python -m benchmarks.profiling [--shape 1024x2816 ...]
"""

import argparse
import time

import torch

from rocket_core.config import PROFILE_RANK_NNZ_RATIOS, PROFILE_RATIOS
from rocket_core.linalg.factorization import FactorizerSettings, prepare_layer
from rocket_core.linalg.whitening import eigenbasis
from rocket_core.methods.rank_search import best_factorizations
from rocket_core.sizes import budget
from tests.reference import factorization as reference

SHAPES = ((1024, 2816), (2048, 2048))
BAR = 10.0


def synthetic_layer(d_in: int, d_out: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a Gaussian weight, and a Gram matrix whose spectrum falls by e^6, as for real activations."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(d_in, d_out, generator=generator, dtype=torch.float64) / d_in**0.5
    rotation, _ = torch.linalg.qr(torch.randn(d_in, d_in, generator=generator, dtype=torch.float64))
    energies = 1e4 * torch.exp(-torch.linspace(0, 6, d_in, dtype=torch.float64))
    return weight, (rotation * energies) @ rotation.T


def compare(d_in: int, d_out: int) -> tuple[float, float, float, float]:
    """Return seconds of library and reference, and the largest and smallest relative deviation of the best error."""
    weight, gram = synthetic_layer(d_in, d_out)
    began = time.perf_counter()
    layer = prepare_layer(weight, eigenbasis(weight, gram), FactorizerSettings(), dtype=torch.float32)
    found = [
        (factorization.rank, factorization.nnz, factorization.weight_error())
        for factorization in best_factorizations(layer, PROFILE_RATIOS, PROFILE_RANK_NNZ_RATIOS, objective="weight")
    ]
    seconds = time.perf_counter() - began

    began = time.perf_counter()
    shapes = [
        shape
        for ratio in PROFILE_RATIOS
        for shape in budget.candidate_shapes(d_in, d_out, ratio, PROFILE_RANK_NNZ_RATIOS)
    ]
    table = reference.profile(weight, gram, shapes)
    reference_seconds = time.perf_counter() - began

    deviations = []
    for ratio in PROFILE_RATIOS:
        at_ratio = budget.candidate_shapes(d_in, d_out, ratio, PROFILE_RANK_NNZ_RATIOS)
        best = min((table[shape][0] for shape in at_ratio), default=None)
        errors = [error for rank, nnz, error in found if (rank, nnz) in at_ratio]
        if best is not None:
            deviations.append(min(errors) / best - 1)
    return seconds, reference_seconds, max(deviations), min(deviations)


def main(shapes: tuple[tuple[int, int], ...] = SHAPES) -> None:
    """Print one line per shape."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    print("profiling one layer, objective weight, one thread (reference: explicit, full grid, float64)")
    for d_in, d_out in shapes:
        seconds, reference_seconds, highest, lowest = compare(d_in, d_out)
        ratio = reference_seconds / seconds
        print(
            f"  {d_in} x {d_out}: {seconds:.1f} s against {reference_seconds:.1f} s, {ratio:.1f} times faster "
            f"(bar {BAR:.0f}: {'met' if ratio >= BAR else 'MISSED'}); best error per ratio deviates by "
            f"{lowest:+.1e} to {highest:+.1e}",
            flush=True,
        )
    torch.set_num_threads(threads)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", help="d_in x d_out, such as 512x512; may be repeated")
    shapes = parser.parse_args().shape
    main(tuple(tuple(int(side) for side in shape.split("x")) for shape in shapes) if shapes else SHAPES)
