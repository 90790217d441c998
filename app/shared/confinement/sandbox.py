"""A sandbox for this process: named files only, without network and without a way to gain privileges.

Landlock restricts files, and also keeps the process from tracing processes outside, and so from reading their
environment; seccomp refuses system calls. Neither needs root, and both apply to everything that the process starts.
"""

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from app.shared.confinement import kernel
from app.shared.confinement.system_calls import end_connections, refuse_calls

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
_CHANGE = _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_FIFO | _MAKE_SYM | _REFER
_WRITE = _READ | _WRITE_FILE | _TRUNCATE | _CHANGE
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
_ACCELERATORS = ("dev/nvidia*", "dev/nvidia-caps", "dev/dri", "dev/kfd")
# The folder of this project's packages; an editable install does not have them on the path.
_PROJECT = Path(__file__).resolve().parents[3]
# A process that enters the sandbox and reports what holds.
_TRIAL = "from app.shared.confinement import sandbox; sandbox.report_trial()"
_TRIAL_SECONDS = 30.0
_NOWHERE = "/proc/nowhere"
_log = logging.getLogger(__name__)


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


class SandboxError(Exception):
    """A part of the sandbox that is required is not enforced; the process must end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Enforced:
    """The parts of a sandbox that hold, as tried in the process itself.

    Attributes:
        privileges: no privileges can be gained.
        files: only files of the sandbox can be opened, and no outside process can be traced.
        calls: only system calls that computing needs can be made; no socket can be opened unless the sandbox allows it.
    """

    privileges: bool
    files: bool
    calls: bool

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of what is not enforced."""
        named = {"privileges": self.privileges, "files": self.files, "system calls": self.calls}
        return tuple(name for name, is_enforced in named.items() if not is_enforced)


@cache
def supported() -> Enforced:
    """Return what this system enforces, as tried once in a separate process.

    A kernel that has Landlock and seccomp may still refuse them, for example under the filter of a container.
    """
    try:
        trial = subprocess.run(  # noqa: S603 - our own interpreter and code
            [sys.executable, "-P", "-c", _TRIAL],
            env=os.environ | {"PYTHONPATH": os.pathsep.join((str(_PROJECT), *sys.path))},
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TRIAL_SECONDS,
            check=True,
        )
        return Enforced(**json.loads(trial.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        _log.warning("cannot try the confinement of processes: %s", error)
        return Enforced(privileges=False, files=False, calls=False)


def report_trial() -> None:
    """Enter a sandbox, and print what holds."""
    sys.stdout.write(json.dumps(asdict(enter_sandbox(Sandbox()))))


def enter_sandbox(sandbox: Sandbox, *, required: bool = False) -> Enforced:
    """Confine this process, and everything that it starts, irrevocably.

    Call it while the process has one thread: files are restricted for the calling thread and those that it starts.
    Paths that do not exist are skipped. Open files stay usable.

    Args:
        sandbox: what it may still use.
        required: whether every part must hold.

    Raises:
        OSError: the kernel has Landlock and refuses the rules.
        SandboxError: a required part does not hold.
    """
    if kernel.give_up_privileges():
        version = kernel.landlock_version()
        if version > 0:
            _restrict_files(sandbox, version)
        refuse_calls(network=not sandbox.network, signals=_SIGNALS & _known(_SCOPES_SINCE, version) == 0)
    enforced = Enforced(
        privileges=kernel.has_given_up_privileges(),
        files=_is_refused(lambda: list(Path("/").iterdir())),
        calls=_is_refused(lambda: os.truncate(_NOWHERE, 0)) and (sandbox.network or _is_refused(_open_socket)),
    )
    if required and enforced.missing:
        raise SandboxError(f"the system does not restrict {', '.join(enforced.missing)} of this process")
    return enforced


def close_network(*, required: bool = False) -> bool:
    """End all connections of this confined process and refuse new sockets in all its threads, irrevocably.

    Args:
        required: whether it must hold.

    Returns:
        Whether it holds.

    Raises:
        SandboxError: it is required and does not hold.
    """
    refuse_calls(network=True, signals=False)
    end_connections()
    is_closed = _is_refused(_open_socket)
    if required and not is_closed:
        raise SandboxError("the system does not refuse this process the network")
    return is_closed


def programs() -> tuple[Path, ...]:
    """Return the files and folders of programs, libraries and system information."""
    return (*map(Path, _SYSTEM), *_interpreter())


def accelerators() -> tuple[Path, ...]:
    """Return the devices of accelerators."""
    return tuple(path for pattern in _ACCELERATORS for path in Path("/").glob(pattern))


def _is_refused(action: Callable[[], object]) -> bool:
    try:
        action()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _open_socket() -> None:
    socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).close()


def _restrict_files(sandbox: Sandbox, version: int) -> None:
    handled = _known(_FILES_SINCE, version)
    network = 0 if sandbox.network else _known(_NETWORK_SINCE, version)
    ruleset = kernel.create_ruleset(handled, network, _known(_SCOPES_SINCE, version))
    try:
        _allow(ruleset, programs(), handled & (_READ | _EXECUTE))
        _allow(ruleset, map(Path, _READABLE_DEVICES), handled & _READ)
        _allow(ruleset, (Path("/dev/null"), *accelerators()), handled & (_WRITE | _IOCTL_DEV))
        _allow(ruleset, sandbox.readable, handled & _READ)
        _allow(ruleset, sandbox.writable, handled & _WRITE)
        kernel.restrict_self(ruleset)
    finally:
        os.close(ruleset)


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
