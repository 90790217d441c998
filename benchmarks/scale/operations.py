"""Floating-point operations and time of every matrix product and factorization that a program runs."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FACTORIZATIONS: Mapping[str, Callable[..., float]] = {
    "linalg_cholesky_ex": lambda n, _m: n**3 / 3,
    "cholesky_inverse": lambda n, _m: 2 * n**3 / 3,
    "linalg_inv_ex": lambda n, _m: 2 * n**3,
    "_linalg_eigh": lambda n, _m: 9 * n**3,
    "linalg_qr": lambda n, m: 2 * m * n**2,
    "linalg_solve_triangular": lambda n, m: n**2 * m,
    "triangular_solve": lambda n, m: n**2 * m,
    "_cholesky_solve_helper": lambda n, m: 2 * n**2 * m,
    "_linalg_solve_ex": lambda n, m: 2 * n**3 / 3 + 2 * n**2 * m,
}
"""Operations of factorizations by name, given both sides, with the leading terms of the usual algorithms."""
# Share of the time of products whose rate is compared with that of `torch.mm`.
_COMPARED = 0.95
_LEAST_SECONDS = 0.3
# Larger products are compared with fewer rows of the same matrices, which are multiplied as fast.
_MOST_OPERATIONS, _LEAST_ROWS = 2e11, 1024


@dataclass(frozen=True, slots=True)
class Product:
    """The shapes of a matrix product: `count` products (m x k) @ (k x n)."""

    count: int
    m: int
    k: int
    n: int
    dtype: torch.dtype

    @property
    def operations(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.count * self.m * self.k * self.n


@dataclass(kw_only=True, slots=True)
class Spent:
    """Sums over calls."""

    calls: int = 0
    operations: float = 0.0
    seconds: float = 0.0

    def add(self, operations: float, seconds: float) -> None:
        """Add a call."""
        self.calls += 1
        self.operations += operations
        self.seconds += seconds


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """A record of the operations in a block of code; time is that of the processor, or of an accelerator.

    Attributes:
        stage: name to which operations are charged.
        products: by stage and shapes.
        factorizations: by stage and name.
        others: seconds of all other operations, by stage and name.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stage = ""
        self.products: dict[tuple[str, Product], Spent] = defaultdict(Spent)
        self.factorizations: dict[tuple[str, str], Spent] = defaultdict(Spent)
        self.others: dict[tuple[str, str], Spent] = defaultdict(Spent)
        self._clock = clock_of(device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and time an operation."""
        began = self._clock()
        result = func(*args, **(kwargs or {}))
        seconds = self._clock() - began
        name = func.overloadpacket.__name__
        product = product_of(name, args)
        if product is not None:
            self.products[self.stage, product].add(product.operations, seconds)
        elif name in FACTORIZATIONS:
            n, m = sides_of(args)
            self.factorizations[self.stage, f"{name} {n} x {m} {args[0].dtype}"].add(
                FACTORIZATIONS[name](n, m), seconds
            )
        else:
            self.others[self.stage, name].add(0.0, seconds)
        return result


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock: of the processor's time, or on an accelerator one that waits for it."""
    if device.type == "cpu":
        return time.process_time

    def waited() -> float:
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    return waited


def product_of(name: str, args: tuple[Any, ...]) -> Product | None:
    """Return the shapes of an operation, given its name and arguments; None if it is not a product of matrices."""
    if name in {"mm", "bmm", "mv"}:
        left, right = args[:2]
    elif name in {"addmm", "addmm_", "baddbmm", "addmv"}:
        left, right = args[1:3]
    elif name.startswith("_scaled_dot_product") and "backward" not in name:
        query, key = args[:2]
        count = query.shape[0] * query.shape[1]
        # Both products of attention have as many operations.
        return Product(2 * count, query.shape[2], query.shape[3], key.shape[2], query.dtype)
    else:
        return None
    columns = right.shape[-1] if right.ndim > 1 else 1
    count = left.shape[0] if left.ndim == 3 else 1
    return Product(count, left.shape[-2], left.shape[-1], columns, left.dtype)


def sides_of(args: tuple[Any, ...]) -> tuple[int, int]:
    """Return the smallest and the largest side of an operation's matrices."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    sizes = [size for tensor in tensors for size in tensor.shape[-2:]]
    return min(sizes), max(sizes)


def seconds_in_mm(spent: Iterable[tuple[Product, Spent]], device: torch.device) -> tuple[float, float]:
    """Return the seconds of the most expensive products, and those that `torch.mm` takes for the same matrices.

    Args:
        spent: products and what they took.
        device: device to measure on.
    """
    ordered = sorted(spent, key=lambda pair: -pair[1].seconds)
    total, taken, ideal = sum(pair[1].seconds for pair in ordered), 0.0, 0.0
    for product, own in ordered:
        if taken > _COMPARED * total:
            break
        taken += own.seconds
        ideal += own.operations * _seconds_per_operation(product, device)
    return taken, ideal


def _seconds_per_operation(product: Product, device: torch.device) -> float:
    clock = clock_of(device)
    rows = min(product.m, max(_LEAST_ROWS, int(_MOST_OPERATIONS / (2 * product.k * product.n))))
    left, right = (
        torch.randn(shape, device=device).to(product.dtype) for shape in ((rows, product.k), (product.k, product.n))
    )
    torch.mm(left, right)
    began, calls = clock(), 0
    while clock() - began < _LEAST_SECONDS:
        torch.mm(left, right)
        calls += 1
    return (clock() - began) / (calls * 2.0 * rows * product.k * product.n)
