"""A sandbox for this process: named files only, without network and without a way to gain privileges.

Landlock restricts files, and also keeps the process from tracing processes outside, and so from reading their
environment; seccomp refuses new sockets. Neither needs root, and both apply to everything that the process starts.
"""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from app.shared.confinement import kernel
from app.shared.confinement.system_calls import can_filter, end_connections, refuse_calls

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE = 1 << 4, 1 << 5
_MAKE_CHAR, _MAKE_DIR, _MAKE_REG, _MAKE_SOCK = 1 << 6, 1 << 7, 1 << 8, 1 << 9
_MAKE_FIFO, _MAKE_BLOCK, _MAKE_SYM = 1 << 10, 1 << 11, 1 << 12
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_BIND_TCP, _CONNECT_TCP = 1 << 0, 1 << 1
_ABSTRACT_SOCKETS, _SIGNALS = 1 << 0, 1 << 1

# Access rights that each version of Landlock's interface added.
_FILES_SINCE = {1: (1 << 13) - 1, 2: _REFER, 3: _TRUNCATE, 5: _IOCTL_DEV}
_NETWORK_SINCE = {4: _BIND_TCP | _CONNECT_TCP}
_SCOPES_SINCE = {6: _ABSTRACT_SOCKETS | _SIGNALS}

_READ = _READ_FILE | _READ_DIR
# Neither devices nor sockets; links and pipes are harmless, as their targets are checked when opened.
_WRITE = (
    _READ
    | _WRITE_FILE
    | _REMOVE_DIR
    | _REMOVE_FILE
    | _MAKE_DIR
    | _MAKE_REG
    | _MAKE_FIFO
    | _MAKE_SYM
    | _REFER
    | _TRUNCATE
)
# The only rights that the kernel accepts for anything but a folder.
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

# Programs, libraries, and system information. Only the files of /etc and /dev that libraries need: the others may hold
# secrets, or be a disk.
_SYSTEM = (
    *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store", "/proc", "/sys"),
    *("/etc/alternatives", "/etc/ca-certificates", "/etc/crypto-policies", "/etc/gai.conf", "/etc/group"),
    *("/etc/host.conf", "/etc/hosts", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime"),
    *("/etc/mime.types", "/etc/nsswitch.conf", "/etc/os-release", "/etc/passwd", "/etc/pki", "/etc/resolv.conf"),
    *("/etc/ssl", "/etc/timezone"),
)
_READABLE_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
# Accelerators are driven by writing to their devices.
_WRITABLE_DEVICES = ("/dev/null", "/dev/nvidia*", "/dev/nvidia-caps", "/dev/dri", "/dev/kfd")
# The folder of this project's packages; an editable install does not have them on the path.
_PROJECT = Path(__file__).resolve().parents[3]
# Semaphores of Python and of OpenMP.
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - not used for temporary files


@dataclass(frozen=True, kw_only=True, slots=True)
class Sandbox:
    """What a confined process may still use, in addition to the interpreter and the system's libraries.

    Attributes:
        readable: files, and folders with everything below them.
        writable: the same, for reading, writing, creating and removing.
        network: whether it may open sockets.
    """

    readable: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()
    network: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Enforced:
    """The parts of a sandbox that the kernel enforces.

    Attributes:
        privileges: no privileges can be gained.
        files: only files of the sandbox can be opened, and no outside process can be traced or signalled.
        network: no socket can be opened; also False if the sandbox allows it.
    """

    privileges: bool
    files: bool
    network: bool

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of what is not enforced."""
        named = {"privileges": self.privileges, "files": self.files, "network": self.network}
        return tuple(name for name, is_enforced in named.items() if not is_enforced)


def supported() -> Enforced:
    """Return what this system could enforce, without changing anything."""
    is_linux = sys.platform == "linux"
    return Enforced(privileges=is_linux, files=kernel.landlock_version() > 0, network=can_filter())


def enter_sandbox(sandbox: Sandbox) -> Enforced:
    """Confine this process, and everything that it starts, irrevocably.

    Call it while the process has one thread: files are restricted for the calling thread and those that it starts.
    Paths that do not exist are skipped. Open files stay usable.

    Raises:
        OSError: the kernel has Landlock and refuses the rules.
    """
    privileges = kernel.give_up_privileges()
    files = privileges and _restrict_files(sandbox)
    filtered = privileges and refuse_calls(network=not sandbox.network)
    return Enforced(privileges=privileges, files=files, network=filtered and not sandbox.network)


def close_network() -> bool:
    """End all connections of this process and refuse new sockets in all its threads, irrevocably.

    Returns:
        Whether the kernel enforces it.
    """
    if not (kernel.give_up_privileges() and refuse_calls(network=True)):
        return False
    end_connections()
    return True


def _restrict_files(sandbox: Sandbox) -> bool:
    version = kernel.landlock_version()
    if version == 0:
        return False
    handled = _known(_FILES_SINCE, version)
    network = 0 if sandbox.network else _known(_NETWORK_SINCE, version)
    ruleset = kernel.create_ruleset(handled, network, _known(_SCOPES_SINCE, version))
    try:
        _allow(ruleset, (*map(Path, _SYSTEM), *_interpreter()), handled & (_READ | _EXECUTE))
        _allow(ruleset, map(Path, _READABLE_DEVICES), handled & _READ)
        devices = [path for pattern in _WRITABLE_DEVICES for path in Path("/").glob(pattern.lstrip("/"))]
        _allow(ruleset, (*devices, Path(_SHARED_MEMORY)), handled & (_WRITE | _IOCTL_DEV))
        _allow(ruleset, sandbox.readable, handled & _READ)
        _allow(ruleset, sandbox.writable, handled & _WRITE)
        kernel.restrict_self(ruleset)
    finally:
        os.close(ruleset)
    return True


def _known(since: dict[int, int], version: int) -> int:
    return sum(rights for first, rights in since.items() if first <= version)


def _allow(ruleset: int, paths: Iterable[Path], access: int) -> None:
    for path in paths:
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                kernel.allow_beneath(ruleset, descriptor, access if path.is_dir() else access & _OF_A_FILE)
            finally:
                os.close(descriptor)


def _interpreter() -> set[Path]:
    """Return the paths of Python, its packages and this project.

    From a folder that is only imported from, such as a checkout, only the packages and modules: it may contain a
    service's data folder.
    """
    homes = {Path(home).resolve() for home in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    paths = set(homes)
    for entry in (*sys.path, str(_PROJECT)):
        folder = Path(entry or ".").resolve()
        if any(folder.is_relative_to(home) for home in homes):
            continue
        if folder.is_dir() and folder.name not in {"site-packages", "dist-packages"}:
            paths |= {path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
        else:
            paths.add(folder)
    return paths
