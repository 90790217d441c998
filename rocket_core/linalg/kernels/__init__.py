"""The loops of rounding, which visit one input after another: compiled for CPUs and GPUs, with a reference in torch.

All three compute the same codes, but for ties that float rounding decides. `for_device` chooses which one runs, and
`recorded_names` tells which ones did.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from rocket_core.linalg.code_grids import Levels
from rocket_core.linalg.kernels.rate import Rate
from rocket_core.linalg.kernels.tries import Tries

GPUS = {"cuda", "xpu"}
"""Types of devices that Triton compiles for."""

_open_records: list[set[str]] = []


@runtime_checkable
class Kernels(Protocol):
    """One implementation of the loops.

    Attributes:
        NAME: its name.
        BLOCK: inputs that it rounds before the others are corrected for their errors by one matrix product.
    """

    NAME: str
    BLOCK: int

    def round_block(
        self,
        rest: Float[Tensor, "size columns"],
        codes: Float[Tensor, "size columns"],
        factor: Float[Tensor, "size size"],
        steps: Float[Tensor, "size columns"],
        levels: Levels,
        rate: Rate | None,
    ) -> Float[Tensor, "size columns"]:
        """Round a block of inputs, one after another, and return their errors in units of the factor's diagonal.

        Args:
            rest: the weight in the order of rounding, which is overwritten.
            codes: where the codes go.
            factor: the block's part of `RoundingGram.factor`.
            steps: step of each entry.
            levels: what codes can be.
            rate: what bits cost; None rounds to nearest.
        """

    def descend(
        self,
        codes: Float[Tensor, "n columns"],
        slope: Float[Tensor, "n columns"],
        matrix: Float[Tensor, "n n"],
        steps: Float[Tensor, "n columns"],
        order: Int64[Tensor, " n"],
        levels: Levels,
        rate: Rate | None,
        sweeps: int,
    ) -> None:
        """Visit every code, in place, and give it the best value that it can have, given all others.

        Args:
            codes: the codes.
            slope: G(W - W̃), which is kept up to date.
            matrix: G, symmetric.
            steps: step of each entry.
            order: inputs in the order of visits.
            levels: what codes can be.
            rate: what bits cost; None minimises the error alone.
            sweeps: most visits to every entry; fewer if codes stop changing.
        """

    def best_scales(
        self,
        weight: Float[Tensor, "groups size columns"],
        importance: Float[Tensor, "groups size 1"],
        first: Float[Tensor, "groups columns"],
        tries: Tries,
    ) -> Float[Tensor, "groups columns"]:
        """Return for each group and column the scale with the least Σ_i h_i (w_i - w̃_i)², the first of equal ones.

        Args:
            weight: w.
            importance: h.
            first: place of the first scale to try.
            tries: scales to try.
        """

    def code_moments(
        self,
        weight: Float[Tensor, "groups size columns"],
        importance: Float[Tensor, "groups size 1"],
        steps: Float[Tensor, "groups columns"],
        offsets: Float[Tensor, "groups columns"] | None,
        levels: Levels,
    ) -> Float64[Tensor, "3 groups columns"]:
        """Return Σ h c², Σ h c and Σ h c w of each group and column, c the code nearest to (w + offset) / step.

        Args:
            weight: w.
            importance: h.
            steps: step of each group.
            offsets: offset of each group; None for zero.
            levels: what codes can be.
        """


def for_device(device: torch.device) -> Kernels:
    """Return the fastest loops that run on a device: numba's on CPUs, Triton's on GPUs, and torch's elsewhere."""
    chosen = _fastest(device)
    for names in _open_records:
        names.add(chosen.NAME)
    return chosen


@contextmanager
def recorded_names() -> Iterator[set[str]]:
    """Collect the names of the implementations that are chosen within the block, by any thread."""
    names: set[str] = set()
    _open_records.append(names)
    try:
        yield names
    finally:
        # By identity, as records with the same names are equal.
        _open_records[:] = [record for record in _open_records if record is not names]


def _fastest(device: torch.device) -> Kernels:
    if device.type == "cpu" and _installed("numba"):
        from rocket_core.linalg.kernels import on_cpu

        return on_cpu
    if device.type in GPUS and _installed("triton"):
        from rocket_core.linalg.kernels import on_gpu

        return on_gpu
    from rocket_core.linalg.kernels import reference

    return reference


@cache
def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
