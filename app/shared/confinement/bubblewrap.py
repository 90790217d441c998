"""Starting a process with bubblewrap: in its own namespaces, in which only named files exist.

Such a process has its own process ids, `/proc`, shared memory and, without a network, its own empty one; it cannot even
see what it may not use. It then enters the sandbox of this package in addition.
"""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from app.shared.confinement.sandbox import Sandbox, accelerators, programs

_TRIAL_SECONDS = 10.0
# The process is the first of its namespace, so that signals and limits can be set from outside by the id that
# bubblewrap reports. It ends with the process that starts it.
_OPTIONS = ("--unshare-all", "--as-pid-1", "--die-with-parent", "--hostname", "rocket")
# Made by bubblewrap, for the new namespaces.
_MADE = frozenset({Path("/proc")})


@cache
def bubblewrap_fault() -> str | None:
    """Return why bubblewrap cannot be used here, as tried once; None if it can."""
    program = shutil.which("bwrap")
    if program is None:
        return "bwrap is not installed"
    try:
        trial = subprocess.run(  # noqa: S603 - the path is that of a program on the operator's PATH
            [program, *_OPTIONS, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TRIAL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None if trial.returncode == 0 else trial.stderr.strip() or f"exit code {trial.returncode}"


def bubblewrap_command(sandbox: Sandbox, *, folder: Path, info: int) -> list[str]:
    """Return the start of a command line that runs the rest of it confined.

    Args:
        sandbox: what the process may use; paths that do not exist are skipped.
        folder: its working directory.
        info: descriptor to which bubblewrap writes the process id, as JSON.
    """
    network = ("--share-net",) if sandbox.network else ()
    mounts = [argument for mount in _mounts(sandbox, folder) for argument in mount]
    return ["bwrap", *_OPTIONS, *network, *mounts, "--chdir", str(folder), "--info-fd", str(info), "--"]


def _mounts(sandbox: Sandbox, folder: Path) -> Iterator[Sequence[str]]:
    yield ("--proc", "/proc")
    yield ("--dev", "/dev")
    bound = {path: "--ro-bind" for path in (*programs(), folder, *sandbox.readable) if path not in _MADE}
    bound |= dict.fromkeys(sandbox.writable, "--bind") | dict.fromkeys(accelerators(), "--dev-bind")
    # A folder before what is inside it, which it would hide.
    for path in sorted(bound, key=lambda path: len(path.parts)):
        if path.exists():
            yield (bound[path], str(path), str(path))
