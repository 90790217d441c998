"""What a compression aims at: a ratio, or a size."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ByRatio:
    """A compression ratio.

    Attributes:
        ratio: fraction of the budget unit to remove from the compressible layers, [0, 1).
    """

    ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ByBytes:
    """A size, which counts bytes whatever the budget unit is.

    Attributes:
        target_bytes: upper bound on the bytes of all safetensors of the factored artifact.
    """

    target_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ByError:
    """An error, which can be asked of a profiled model only.

    Attributes:
        error: upper bound on the predicted error, >= 0, in the unit of the profile's objective.
    """

    error: float


Target = ByRatio | ByBytes


def target_of(ratio: float | int | None, target_bytes: int | None) -> Target | None:
    """Return the target that two members of a request, a row or a command line specify; None if neither is given.

    Raises:
        ValueError: both are given.
    """
    if ratio is not None and target_bytes is not None:
        raise ValueError("specify either ratio or target_bytes, not both")
    if ratio is not None:
        return ByRatio(ratio=float(ratio))
    return None if target_bytes is None else ByBytes(target_bytes=target_bytes)
