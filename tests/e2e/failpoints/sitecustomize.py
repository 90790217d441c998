"""Kills a process when it comes to a named function: a test puts this folder on PYTHONPATH of what it starts.

So the product itself has no code for that. The variable FAILPOINTS holds JSON: the `folder` of the marks, and `points`,
each with its `name`, the `function` (`module:Class.function`), `when` (before or after it), at which `call` of a
process, and the `victim`: `self`, `parent`, or the name of a file in `folder` that holds a process id. Each strikes
once, whatever process comes there first: it leaves a file of its name.

The variable STAND_IN holds the path of a program that workers run in place of `worker.job`.
"""

import functools
import importlib
import importlib.machinery
import json
import os
import signal
import sys
from pathlib import Path

FAILPOINTS = "FAILPOINTS"
STAND_IN = "STAND_IN"


def _strike(folder, point):
    try:
        descriptor = os.open(folder / point["name"], os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return
    os.write(descriptor, str(os.getpid()).encode())
    os.fsync(descriptor)
    os.close(descriptor)
    known = {"self": os.getpid, "parent": os.getppid}
    find = known.get(point["victim"], lambda: int((folder / point["victim"]).read_text()))
    os.kill(find(), signal.SIGKILL)


def _wrap(module, folder, point):
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
                _strike(folder, point)
            return function(*arguments, **options)
        answer = function(*arguments, **options)
        # What came to nothing is no call: a claim that found no job, for instance.
        calls += answer is not None or not point.get("with_answer")
        if calls == point["call"]:
            _strike(folder, point)
        return answer

    setattr(owner, name, wrapped)


class _Finder:
    """Alters modules when they have been imported: what to do with each, by its name."""

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
    given = json.loads(os.environ.get(FAILPOINTS, '{"folder": "", "points": []}'))
    folder = Path(given["folder"])
    changes = {}
    for point in given["points"]:
        # What has struck once does not strike again.
        if not (folder / point["name"]).exists():
            change = functools.partial(_wrap, folder=folder, point=point)
            changes.setdefault(point["function"].partition(":")[0], []).append(change)
    if STAND_IN in os.environ:
        program = (os.environ[STAND_IN],)
        changes["worker.runner"] = [*changes.get("worker.runner", ()), lambda m: setattr(m, "JOB_PROGRAM", program)]
    for name in changes.keys() & sys.modules.keys():
        for change in changes[name]:
            change(sys.modules[name])
    sys.meta_path.insert(0, _Finder(changes))


if FAILPOINTS in os.environ or STAND_IN in os.environ:
    _install()
