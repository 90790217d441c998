"""A program in the sandbox of a job, which attacks the service that would have started it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.attacks.target import Target

# As the processes of jobs enter it, on the machine and as the user of the service.
_PROGRAM = """
import ctypes, json, os, resource, signal, socket, sys
from pathlib import Path
from app.shared.confinement import Sandbox, enter_sandbox

own, data, pids = Path(sys.argv[1]), Path(sys.argv[2]), [int(pid) for pid in sys.argv[3:]]
enter_sandbox(Sandbox(writable=(own,)), required=True)
attempts = {
    "a secret": lambda: (data / "secret.key").read_bytes(),
    "a list": lambda: list(data.iterdir()),
    "a mode": lambda: os.chmod(data, 0),
    "an owner": lambda: os.chown(data / "rocket.sqlite3", 1, 1),
    "a time": lambda: os.utime(data / "rocket.sqlite3", (0, 0)),
    "an attribute": lambda: os.setxattr(data / "rocket.sqlite3", "user.a", b"b"),
    "a length": lambda: os.truncate(data / "rocket.sqlite3", 0),
    "a socket": lambda: socket.socket(),
    "shared memory": lambda: Path("/dev/shm/attack").write_bytes(b"x"),
    "a session": os.setsid,
    "its own limit": lambda: resource.setrlimit(resource.RLIMIT_DATA, (2**60, 2**60)),
}
for pid in pids:
    attempts |= {
        f"a signal to {pid}": lambda pid=pid: os.kill(pid, signal.SIGKILL),
        f"a limit of {pid}": lambda pid=pid: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)),
        f"the processors of {pid}": lambda pid=pid: os.sched_setaffinity(pid, {0}),
        f"the priority of {pid}": lambda pid=pid: os.setpriority(os.PRIO_PROCESS, pid, 19),
        f"the policy of {pid}": lambda pid=pid: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
        f"the environment of {pid}": lambda pid=pid: Path(f"/proc/{pid}/environ").read_bytes(),
    }
succeeded = []
for name, attempt in attempts.items():
    try:
        attempt()
    except (OSError, ValueError):
        continue
    succeeded.append(name)
print(json.dumps([len(attempts), succeeded]))
"""


def a_confined_program(target: Target) -> str:
    """Enter the sandbox of a job, and change what belongs to the service: its files, its processes, its limits."""
    own = target.service.data_dir / "attack"
    own.mkdir(exist_ok=True)
    pids = [target.service.process.pid, *(process.pid for process in target.service.descendants())]
    command = [sys.executable, "-P", "-c", _PROGRAM, str(own), str(target.service.data_dir), *map(str, pids)]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)  # noqa: S603
    count, succeeded = json.loads(result.stdout)
    assert not succeeded, f"changed or read {', '.join(succeeded)}"
    return f"all of {count} attempts on {len(pids)} processes were refused"


ATTACKS: tuple[Callable[[Target], str], ...] = (a_confined_program,)
