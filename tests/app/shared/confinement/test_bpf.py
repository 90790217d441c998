"""Programs that decide over system calls, run by an interpreter of their instructions."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from app.shared.confinement import system_calls
from app.shared.confinement.bpf import ARCHITECTURES, Condition, program

ALLOW, EACCES, ENOSYS = 0x7FFF0000, 0x0005000D, 0x00050026
HERE = ARCHITECTURES["aarch64"]


def decide(code, architecture, number, arguments):
    """Return what a program returns for a system call, as the kernel runs it."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments)
    steps = list(struct.iter_unpack("=HBBI", code))
    position, accumulator = 0, 0
    while True:
        operation, if_true, if_false, value = steps[position]
        position += 1
        match operation:
            case 0x20:
                [accumulator] = struct.unpack_from("=I", data, value)
            case 0x54:
                accumulator &= value
            case 0x15:
                position += if_true if accumulator == value else if_false
            case 0x35:
                position += if_true if accumulator >= value else if_false
            case 0x06:
                return value
            case _:
                raise AssertionError(operation)


words = st.integers(0, 2**64 - 1) | st.integers(0, 9) | st.integers(0, 9).map(lambda high: high << 32)
conditions = st.builds(
    Condition,
    st.integers(0, 5),
    st.frozensets(st.integers(0, 9), min_size=1, max_size=4),
    mask=st.sampled_from([0xFFFFFFFF, 0xF, 0]),
    refused=st.booleans(),
    high=st.booleans(),
)


def holds(condition, arguments):
    half = arguments[condition.argument] >> (32 if condition.high else 0) & 0xFFFFFFFF
    return (half & condition.mask in condition.values) != condition.refused


@given(
    allowed=st.sets(st.integers(0, 9), max_size=5),
    conditional=st.dictionaries(st.integers(10, 14), st.lists(conditions, max_size=3), max_size=4),
    number=st.integers(0, 20),
    arguments=st.lists(words, min_size=6, max_size=6),
)
def test_a_program_allows_what_it_is_told_and_nothing_else(allowed, conditional, number, arguments):
    code = program(HERE, allowed=sorted(allowed), conditional=conditional, errors=(13, 16, 38))
    met = number in conditional and all(holds(condition, arguments) for condition in conditional[number])
    refusal = ENOSYS if number >= 16 else EACCES
    if number in conditional and not met:
        refusal = EACCES
    assert decide(code, HERE, number, arguments) == (ALLOW if number in allowed or met else refusal)
    assert decide(code, ARCHITECTURES["x86_64"], number, arguments) == EACCES
    assert decide(code, HERE, number | 0x40000000, arguments) == EACCES


def test_no_call_is_listed_twice_and_numbers_are_unique():
    for machine in ARCHITECTURES:
        tables = (system_calls._ALWAYS, system_calls._NETWORK, system_calls._SOMETIMES)
        listed = [item for table in tables for item in system_calls._numbers(table, machine).items()]
        assert len({name for name, _ in listed}) == len({number for _, number in listed}) == len(listed)


def test_both_machines_have_the_calls_that_a_rule_tests():
    for machine in ARCHITECTURES:
        numbers = system_calls._numbers(system_calls._SOMETIMES, machine)
        assert set(numbers) == set(system_calls._rules(1, signals=True))
