"""Programs of the kernel's classic packet filter that decide over system calls."""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's constants of the machines that programs are written for, by the names of the machines."""

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
# Offsets in the kernel's `struct seccomp_data`.
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
# Numbers from here on are x32 calls of an x86-64 kernel.
_X32 = 0x40000000
_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on one half of an argument of a system call.

    Attributes:
        argument: its position.
        values: what it must be equal to one of.
        mask: bits that are compared.
        refused: whether it must be equal to none of the values instead.
        high: whether the upper 32 bits are tested instead of the lower ones.
    """

    argument: int
    values: frozenset[int]
    mask: int = _WORD
    refused: bool = False
    high: bool = False


def program(
    architecture: int,
    *,
    allowed: Sequence[int],
    conditional: Mapping[int, Sequence[Condition]],
    errors: tuple[int, int, int],
) -> bytes:
    """Return a program that allows some system calls and refuses the rest, and those of other architectures.

    Args:
        architecture: the kernel's constant of the machine.
        allowed: numbers of calls that are allowed.
        conditional: numbers of calls that are allowed if their arguments meet all conditions.
        errors: error of a refused call, the number of a call from which on another one is returned, and that one.
    """
    error, first, other = errors
    steps = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, architecture, if_true=1),
        _step(_RETURN, _ERRNO | error),
        _step(_LOAD, _NUMBER),
        _step(_AT_LEAST, _X32, if_false=1),
        _step(_RETURN, _ERRNO | error),
    ]
    for number in allowed:
        steps += [_step(_EQUAL, number, if_false=1), _step(_RETURN, _ALLOW)]
    for number, conditions in conditional.items():
        block = [step for condition in conditions for step in _steps(condition, error)]
        steps += [_step(_EQUAL, number, if_false=len(block) + 1), *block, _step(_RETURN, _ALLOW)]
    steps += [
        _step(_AT_LEAST, first, if_false=1),
        _step(_RETURN, _ERRNO | other),
        _step(_RETURN, _ERRNO | error),
    ]
    return b"".join(steps)


def _steps(condition: Condition, error: int) -> Iterator[bytes]:
    """Yield steps that continue after the last one if the condition is met, and refuse the call otherwise."""
    # Both machines store the lower half first.
    yield _step(_LOAD, _ARGUMENTS + 8 * condition.argument + 4 * condition.high)
    yield _step(_AND, condition.mask)
    # A jump leads over the steps in between: past the refusal, or with `refused` to it.
    for left in reversed(range(len(condition.values))):
        yield _step(_EQUAL, sorted(condition.values)[-1 - left], if_true=left + 1)
    if condition.refused:
        yield _step(_AT_LEAST, 0, if_true=1)
    yield _step(_RETURN, _ERRNO | error)


def _step(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
