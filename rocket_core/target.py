"""What a compression aims at: a ratio, a size, or one format for every layer."""

from dataclasses import dataclass

from rocket_core.code_format import CodeBits, CodeFormat


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ByFormat:
    """Every layer as integer codes of the same bits, with float16 scales of groups of the same size.

    Attributes:
        bits: bits of a code.
        group_size: inputs that share a scale; 0 for all inputs of an output.
    """

    bits: CodeBits
    group_size: int

    def code_format(self, d_in: int) -> CodeFormat:
        """Return the format of a layer; groups have at most all of its inputs."""
        return CodeFormat(bits=self.bits, group_size=min(self.group_size or d_in, d_in), scale_bits=16)

    @property
    def text(self) -> str:
        """The format as people say it."""
        return f"{self.bits} bits, {f'groups of {self.group_size}' if self.group_size else 'a scale per output'}"


Target = ByRatio | ByBytes | ByFormat


def target_of(ratio: float | int | None, target_bytes: int | None) -> ByRatio | ByBytes | None:
    """Return the target that two members of a request, a row or a command line specify; None if neither is given.

    Raises:
        ValueError: both are given.
    """
    if ratio is not None and target_bytes is not None:
        raise ValueError("specify either ratio or target_bytes, not both")
    if ratio is not None:
        return ByRatio(ratio=float(ratio))
    return None if target_bytes is None else ByBytes(target_bytes=target_bytes)
