"""Exit codes of the command line."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of all commands: 75 and 77 are from sysexits.h; 130 is what shells use for Ctrl-C."""

    OK = 0
    INTERNAL = 1
    INVALID = 2
    UNUSABLE_INPUT = 3
    OUT_OF_REACH = 4
    MACHINE_TOO_SMALL = 5
    SAVED_STATE = 6
    NOT_FOUND = 7
    CONFLICT = 8
    CANCELLED = 9
    TEMPORARY = 75
    NOT_ALLOWED = 77
    INTERRUPTED = 130
