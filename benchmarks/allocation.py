"""Allocation of a budget to proven optimality on layer shapes of real models, compared with plain dynamic programming.

Costs are as in profiles: a dense candidate, and one per ratio 0.05, 0.10 ... 0.70 that spends the layer's budget to
the last parameter or, in half of the instances, is rounded down to whole atoms and whole nonzeros per column. Errors
follow measured curves, with a separate scale, curvature and noise for each layer. Objectives: `whitened` squares them,
`weight` caps them at 1.01 times the smallest feasible cap, `correlated` makes a layer's error an affine function of
what the layer loses, which knapsack solvers find hardest.

With objectives `fixed length` and `entropy coded` the budget counts bytes, and candidates are the codes that a profile
offers for `storage` `memory` and `file`; their predicted losses fall to a quarter with each bit, as measured ones do.

    python -m benchmarks.allocation
"""

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rocket_core.allocation.cap import smallest_cap
from rocket_core.allocation.knapsack import solve_knapsack
from tests.reference.knapsack import dynamic_programme

RATIOS = (0.2, 0.33, 0.5)
BYTE_RATIOS = (0.5, 0.7, 0.85)
SEEDS = (0, 1)
OBJECTIVES = ("whitened", "weight", "correlated")
BYTE_OBJECTIVES = ("fixed length", "entropy coded")
BINS = 50_000
# Relative error of a layer at ratio 0.05, 0.10 ... 0.70.
ERROR_CURVE = (0.192, 0.209, 0.226, 0.245, 0.264, 0.285, 0.305, 0.327, 0.351, 0.375, 0.402, 0.432, 0.463, 0.495)
# Inputs that share a scale of one byte, 0 for all of them; and the loss that such groups have, as a multiple.
CODE_GROUPS = {32: 1.0, 64: 1.18, 0: 1.38}
# Bits per weight of entropy-coded candidates, each of which has twice the loss of the one before.
CODED_BITS = tuple(6.2 - 0.5 * step for step in range(12))

_LLAMA_BLOCK = [(2048, 2048), (2048, 512), (2048, 512), (2048, 2048), (2048, 8192), (2048, 8192), (8192, 2048)]
_QWEN_BLOCK = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 12288), (4096, 12288), (12288, 4096)]
_EXPERTS = [(2048, 768), (2048, 768), (768, 2048)] * 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Layer shapes, objectives, the number of timed runs per instance, and the seconds that the slowest may take."""

    name: str
    shapes: list[tuple[int, int]]
    runs: int
    bar: float | None
    with_reference: bool
    objectives: tuple[str, ...] = OBJECTIVES


MODELS = (
    Model(name="Llama, 112 x 15", shapes=_LLAMA_BLOCK * 16, runs=9, bar=5e-3, with_reference=True),
    Model(name="Qwen3, 252 x 15", shapes=_QWEN_BLOCK * 36, runs=9, bar=None, with_reference=True),
    Model(name="experts, 18,432 x 15", shapes=_EXPERTS * 48, runs=3, bar=5.0, with_reference=False),
    Model(
        name="experts, 18,432 in bytes",
        shapes=_EXPERTS * 48,
        runs=3,
        bar=5.0,
        with_reference=False,
        objectives=BYTE_OBJECTIVES,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Timings of one model under one objective.

    Attributes:
        median: median over all instances of the seconds of the median run.
        slowest: seconds of the median run of the slowest instance.
        proven: number of instances solved to proven optimality.
        instances: number of instances.
        speedup: median speedup over the dynamic programme.
        reference_excess: largest relative increase of the error by the dynamic programme's rounding.
    """

    median: float
    slowest: float
    proven: int
    instances: int
    speedup: float | None
    reference_excess: float | None


def instance(
    shapes: list[tuple[int, int]], *, objective: str, rounded: bool, ratio: float, seed: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return costs, errors and budget of an instance."""
    generator = np.random.default_rng(seed)
    d_in, d_out = np.array(shapes, dtype=np.int64).T[:, :, None]
    sizes, layers, steps = d_in * d_out, len(shapes), np.arange(1, 15)
    costs = sizes - -(-sizes * steps // 20)
    if rounded:
        atoms_per_nonzero = generator.normal(2, 0.15, (layers, 1)).clip(1.2, 3)
        rank = costs / (d_in + d_out / atoms_per_nonzero)
        costs = d_in * rank.astype(np.int64) + d_out * (rank / atoms_per_nonzero).astype(np.int64)
    if objective == "correlated":
        errors = generator.lognormal(0, 0.3, (layers, 1)) * (1 - costs / sizes + 0.1)
    else:
        curvature = generator.normal(1, 0.25, (layers, 1))
        errors = np.array(ERROR_CURVE) ** curvature * 0.3 ** (1 - curvature)
        errors = errors * generator.lognormal(0, 0.35, (layers, 1)) * generator.normal(1, 0.004, errors.shape)
    costs = np.concatenate((sizes, costs), axis=1)
    errors = np.concatenate((np.zeros((layers, 1)), errors), axis=1)
    budget = int((1 - ratio) * sizes.sum())
    if objective == "weight":
        return costs, np.where(errors <= 1.01 * smallest_cap(costs, errors, budget), errors, np.inf), budget
    return costs, errors**2 if objective == "whitened" else errors, budget


def instance_in_bytes(
    shapes: list[tuple[int, int]], *, objective: str, ratio: float, seed: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return costs, errors and budget of an instance whose candidates are codes, after the dense one.

    Layers differ in what they lose at equal bits, as experts do that are used more or less often. Entropy-coded sizes
    depend on a layer's weights; those of fixed length only on its shape.
    """
    generator = np.random.default_rng(seed)
    d_in, d_out = np.array(shapes, dtype=np.int64).T[:, :, None]
    sizes, layers = d_in * d_out, len(shapes)
    grouped = (8,) if objective == "entropy coded" else (8, 7, 6, 5, 4, 3, 2)
    costs, losses = [2 * sizes], [np.zeros((layers, 1))]
    scale = generator.lognormal(-12, 1, (layers, 1))
    for bits, (group, multiple) in itertools.product(grouped, CODE_GROUPS.items()):
        costs.append(sizes * bits // 8 + (sizes // group if group else d_out))
        losses.append(multiple * 4.0 ** (8 - bits) * scale * generator.normal(1, 0.02, (layers, 1)))
    if objective == "entropy coded":
        for bits in CODED_BITS:
            costs.append((sizes * (bits * generator.normal(1, 0.01, (layers, 1))) / 8).astype(np.int64))
            losses.append(4.0 ** (8 - bits) * scale * generator.normal(1, 0.02, (layers, 1)))
    return np.concatenate(costs, axis=1), np.concatenate(losses, axis=1), int((1 - ratio) * 2 * sizes.sum())


def _instances(model: Model, objective: str) -> Iterator[tuple[np.ndarray, np.ndarray, int, bool]]:
    """Yield costs, errors and budget at all ratios, and whether costs are those of whole atoms."""
    if objective in BYTE_OBJECTIVES:
        for ratio, seed in itertools.product(BYTE_RATIOS, SEEDS):
            yield *instance_in_bytes(model.shapes, objective=objective, ratio=ratio, seed=seed), False
        return
    for ratio, rounded, seed in itertools.product(RATIOS, (False, True), SEEDS):
        yield *instance(model.shapes, objective=objective, rounded=rounded, ratio=ratio, seed=seed), rounded


def measure(model: Model, objective: str) -> Result:
    """Solve the model's instances at all ratios."""
    seconds, speedups, excesses, proven = [], [], [], 0
    for costs, errors, budget, rounded in _instances(model, objective):
        runs = []
        for _ in range(model.runs):
            began = time.perf_counter()
            solution = solve_knapsack(costs, errors, budget)
            runs.append(time.perf_counter() - began)
        assert solution is not None
        seconds.append(statistics.median(runs))
        proven += solution.proven
        if model.with_reference and not rounded:
            unit = -(-budget // BINS)
            began = time.perf_counter()
            least = dynamic_programme(-(-costs // unit), errors, budget // unit)
            speedups.append((time.perf_counter() - began) / seconds[-1])
            # None where no choice fits once every cost is rounded up to a whole bin.
            excesses.append(np.inf if least is None else least / solution.total_error - 1)
    return Result(
        median=statistics.median(seconds),
        slowest=max(seconds),
        proven=proven,
        instances=len(seconds),
        speedup=statistics.median(speedups) if speedups else None,
        reference_excess=max(excesses, default=None),
    )


def run() -> dict[tuple[str, str], Result]:
    """Return the results by model and objective."""
    return {(model.name, objective): measure(model, objective) for model in MODELS for objective in model.objectives}


def _line(model: Model, objective: str, result: Result) -> str:
    line = (
        f"{model.name}, {objective}: proven {result.proven} of {result.instances}, "
        f"median {result.median * 1e3:.1f} ms, slowest {result.slowest * 1e3:.1f} ms"
    )
    if model.bar is not None:
        line += f" (bar {model.bar * 1e3:.0f} ms: {'met' if result.slowest <= model.bar else 'MISSED'})"
    if result.speedup is not None:
        line += f"; {result.speedup:.0f} times faster than the reference, whose error is up to "
        line += f"{result.reference_excess:.1%} higher"
    return line


def main() -> None:
    """Print one line per model and objective."""
    print(f"allocating, one thread (reference: plain dynamic programme on {BINS:,} bins, costs rounded up)")
    for model in MODELS:
        for objective in model.objectives:
            print(f"  {_line(model, objective, measure(model, objective))}", flush=True)


if __name__ == "__main__":
    main()
