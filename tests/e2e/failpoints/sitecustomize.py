"""A hook that kills a process at a named function: a test puts a copy of this file on PYTHONPATH of what it starts.

So the product itself has no code for that. A file `failpoints.json` next to the copy holds the `folder` of the marks,
and `points`, each with its `name`, the `function` (`module:Class.function`), `when` (before or after it), at which
`call` of a process, and the `victim`: `self`, an ancestor (see GENERATIONS), or the name of a file in `folder` that
holds a process id. Each strikes once, whatever process comes there first: it leaves a file of its name. The plan is a
file, because the processes that read models have no variables but those that they need.

Those processes can neither leave marks nor kill: a fork of each, made before it is confined, does so in its place.

The variable STAND_IN holds the path of a program that workers run in place of `worker.attempt.job`.
"""

import contextlib
import functools
import importlib
import importlib.machinery
import json
import os
import signal
import sys
from pathlib import Path

PLAN = Path(__file__).parent / "failpoints.json"
STAND_IN = "STAND_IN"
GENERATIONS = {"self": 0, "parent": 1, "grandparent": 2, "great-grandparent": 3}


def _strike_as(pid, folder, point):
    """Kill the victim of a failpoint that a process has reached."""
    try:
        descriptor = os.open(folder / point["name"], os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return
    os.write(descriptor, str(pid).encode())
    os.fsync(descriptor)
    os.close(descriptor)
    if point["victim"] in GENERATIONS:
        for _ in range(GENERATIONS[point["victim"]]):
            pid = int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
    else:
        pid = int((folder / point["victim"]).read_text())
    os.kill(pid, signal.SIGKILL)


def _strike(folder, point):
    _strike_as(os.getpid(), folder, point)


def _striker(points, folder):
    """Fork a process that strikes for this one, and return a function that asks it to."""
    asked, ask = os.pipe()
    told, tell = os.pipe()
    by_name = {point["name"]: point for point in points}
    if os.fork() == 0:
        parent = os.getppid()
        for file in list(Path("/proc/self/fd").iterdir()):
            # The reader of this process's output must see its end.
            if int(file.name) not in {asked, tell}:
                with contextlib.suppress(OSError):
                    os.close(int(file.name))
        while name := os.read(asked, 256):
            _strike_as(parent, folder, by_name[name.decode()])
            os.write(tell, b".")
        os._exit(0)
    os.close(asked)
    os.close(tell)

    def strike(_folder, point):
        os.write(ask, point["name"].encode())
        os.read(told, 1)

    return strike


def _arm_before_confinement(module, points, folder, strike):
    """Make a process strike through a fork of it, created before it is confined."""
    confine = module.enter_confinement

    def enter_confinement(channel):
        strike.by = _striker(points, folder)
        return confine(channel)

    module.enter_confinement = enter_confinement


class _Strike:
    """How this process strikes: `by` itself, or through a fork once it is confined."""

    def __init__(self):
        self.by = _strike

    def __call__(self, folder, point):
        self.by(folder, point)


def _wrap(module, folder, point, strike):
    *owners, name = point["function"].partition(":")[2].split(".")
    owner = functools.reduce(getattr, owners, module)
    function = getattr(owner, name)
    calls = 0

    @functools.wraps(function)
    def wrapped(*arguments, **options):
        nonlocal calls
        if point["when"] == "before":
            calls += 1
            if calls == point["call"]:
                strike(folder, point)
            return function(*arguments, **options)
        answer = function(*arguments, **options)
        # Calls without a result do not count: a claim that found no job, for example.
        calls += answer is not None or not point.get("with_answer")
        if calls == point["call"]:
            strike(folder, point)
        return answer

    setattr(owner, name, wrapped)


class _Finder:
    """A finder that modifies modules when they have been imported: what to do with each, by its name."""

    def __init__(self, changes):
        self._changes = changes

    def find_spec(self, name, path=None, target=None):
        changes = self._changes.get(name, ())
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if changes else None
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                for change in changes:
                    change(module)

            spec.loader.exec_module = exec_module
        return spec


def _install():
    given = json.loads(PLAN.read_text()) if PLAN.exists() else {"folder": "", "points": []}
    folder = Path(given["folder"])
    # A failpoint that has struck does not strike again.
    points = [point for point in given["points"] if not (folder / point["name"]).exists()]
    strike = _Strike()
    changes = {}
    if points:
        arm = functools.partial(_arm_before_confinement, points=points, folder=folder, strike=strike)
        changes["worker.confined.confinement"] = [arm]
    for point in points:
        change = functools.partial(_wrap, folder=folder, point=point, strike=strike)
        changes.setdefault(point["function"].partition(":")[0], []).append(change)
    if STAND_IN in os.environ:
        program = (os.environ[STAND_IN],)
        name = "worker.processes.job_processes"
        changes[name] = [*changes.get(name, ()), lambda m: setattr(m, "JOB_PROGRAM", program)]
    for name in changes.keys() & sys.modules.keys():
        for change in changes[name]:
            change(sys.modules[name])
    sys.meta_path.insert(0, _Finder(changes))


if PLAN.exists() or STAND_IN in os.environ:
    _install()
