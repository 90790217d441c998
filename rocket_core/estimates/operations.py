"""What the time of a computation depends on. Loads no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from rocket_core.sizes.budget import Shape
from rocket_core.system.machine_speed import MachineSpeed

FLOAT32_BYTES = 4
"""Bytes of a number that is computed with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """What a computation does, as far as its time depends on it.

    Attributes:
        products: operations in products of float32 matrices; slower ones count as more.
        rough_products: operations in products of bfloat16 matrices, on machines where these are faster.
        memory: bytes read by elementwise operations.
        seconds: seconds on any machine.
    """

    products: float = 0.0
    rough_products: float = 0.0
    memory: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: "Operations") -> "Operations":
        """Return the operations of both."""
        return Operations(
            products=self.products + other.products,
            rough_products=self.rough_products + other.rough_products,
            memory=self.memory + other.memory,
            seconds=self.seconds + other.seconds,
        )

    def times(self, count: float) -> "Operations":
        """Return the operations of doing this several times."""
        return Operations(
            products=count * self.products,
            rough_products=count * self.rough_products,
            memory=count * self.memory,
            seconds=count * self.seconds,
        )

    def duration(self, speed: MachineSpeed) -> float:
        """Return the seconds on a machine."""
        busy = self.products / speed.products + self.rough_products / speed.rough_products + self.memory / speed.memory
        return self.seconds + busy


def model_products(operations: float, itemsize: int) -> Operations:
    """Return the operations of products that a model computes, in the dtype of its checkpoint.

    Args:
        operations: their number.
        itemsize: bytes of a number in that dtype.
    """
    if itemsize < FLOAT32_BYTES:
        return Operations(rough_products=operations)
    return Operations(products=operations)


def activation_passes(
    passes: float, shapes: Sequence[Shape], tokens: float, itemsize: int = FLOAT32_BYTES
) -> Operations:
    """Return the operations of passes over what layers read and return.

    Args:
        passes: their number.
        shapes: `(d_in, d_out)` of the layers.
        tokens: tokens that each layer reads.
        itemsize: bytes of a number that the model computes with.
    """
    return Operations(memory=passes * sum(d_in + d_out for d_in, d_out in shapes) * tokens * itemsize)
