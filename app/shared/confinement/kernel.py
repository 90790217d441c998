"""System calls that Python does not provide."""

import ctypes
import os
import signal
import sys

# The same on all architectures.
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_ADD_RULE = 445
_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_CREATE_RULESET_VERSION = 1

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_PR_GET_NO_NEW_PRIVS = 39
_SECCOMP_SET_MODE_FILTER = 1
_SECCOMP_FILTER_FLAG_TSYNC = 1
_LANDLOCK_RULE_PATH_BENEATH = 1

_CAPABILITY_VERSION = 0x20080522
# Kept for root: CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID, to read and write files of any owner. The others
# would bypass Landlock: CAP_PERFMON, for instance, allows reading the environment of any process.
_KEPT_CAPABILITIES = 0b11111
# KILL, SETGID and SETUID.
_CHANGING_USER = 1 << 5 | 1 << 6 | 1 << 7


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def give_up_privileges() -> bool:
    """Drop root's privileges except access to files, and forbid gaining new ones; return whether the system does."""
    if sys.platform != "linux" or _libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    held = _held_capabilities()
    if held is None:
        return False
    low = held[0]
    for name in ("effective", "permitted", "inheritable"):
        setattr(low, name, getattr(low, name) & _KEPT_CAPABILITIES)
    held[1] = _Capabilities()
    return bool(_libc().capset(ctypes.byref(_own_capabilities()), held) == 0)


def _held_capabilities() -> "ctypes.Array[_Capabilities] | None":
    # Capabilities from 32 on are in the second element.
    held = (_Capabilities * 2)()
    return held if _libc().capget(ctypes.byref(_own_capabilities()), held) == 0 else None


def _own_capabilities() -> _CapabilityHeader:
    return _CapabilityHeader(version=_CAPABILITY_VERSION, pid=0)


def may_change_user() -> bool:
    """Return whether this process may start others as another user, and signal and limit them."""
    if sys.platform != "linux":
        return False
    held = _held_capabilities()
    return held is not None and held[0].effective & _CHANGING_USER == _CHANGING_USER


def become_user(number: int) -> None:
    """Become a user and its group of the same number, with access to the files of that group alone.

    Raises:
        OSError: this process may not.
    """
    os.setgroups([])
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)
    # The service, which is in that group, reads and removes what this process writes.
    os.umask(0o007)
    # A new user resets both: it could not list its own descriptors, nor would it end with its parent.
    _libc().prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def has_given_up_privileges() -> bool:
    """Return whether this process can gain no privileges."""
    return sys.platform == "linux" and bool(_libc().prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1)


def landlock_version() -> int:
    """Return the version of Landlock's interface; 0 if the kernel has none."""
    if sys.platform != "linux":
        return 0
    version: int = _libc().syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_CREATE_RULESET_VERSION)
    return max(0, version)


def create_ruleset(files: int, network: int, scopes: int) -> int:
    """Return the descriptor of a Landlock ruleset that denies these kinds of access until rules allow them.

    Raises:
        OSError: the kernel refuses it.
    """
    attributes = _RulesetAttributes(handled_access_fs=files, handled_access_net=network, scoped=scopes)
    return _call(_LANDLOCK_CREATE_RULESET, ctypes.byref(attributes), ctypes.sizeof(attributes), 0)


def allow_beneath(ruleset: int, descriptor: int, access: int) -> None:
    """Allow access to a file, or to a folder and everything below it.

    Raises:
        OSError: the kernel refuses it.
    """
    rule = _PathBeneath(allowed_access=access, parent_fd=descriptor)
    _call(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH_BENEATH, ctypes.byref(rule), 0)


def restrict_self(ruleset: int) -> None:
    """Put the calling thread, and everything that it starts, under a ruleset, irrevocably.

    Raises:
        OSError: the kernel refuses it.
    """
    _call(_LANDLOCK_RESTRICT_SELF, ruleset, 0)


def filter_calls(seccomp: int, code: bytes) -> bool:
    """Put all threads of this process, and everything that they start, under a filter of system calls, irrevocably.

    Args:
        seccomp: number of the system call that does so.
        code: the filter, a program of classic BPF.

    Raises:
        OSError: the kernel refuses it.
    """
    program = _FilterProgram(length=len(code) // 8, filter=code)
    # A positive result is the id of a thread that could not be included.
    return _call(seccomp, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, ctypes.byref(program)) == 0


def _call(number: int, *arguments: object) -> int:
    # With the kernel's width: a plain int would be passed with 32 bits.
    wide = (ctypes.c_long(value) if isinstance(value, int) else value for value in arguments)
    result: int = _libc().syscall(ctypes.c_long(number), *wide)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
