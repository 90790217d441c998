"""Kills a process when it comes to a named function: a test puts this folder on PYTHONPATH of what it starts.

So the product itself has no code for that. The variable FAILPOINTS holds JSON: the `folder` of the marks, and `points`,
each with its `name`, the `function` (`module:Class.function`), `when` (before or after it), at which `call` of a
process, and the `victim`: `self`, `parent`, or the name of a file in `folder` that holds a process id. Each strikes
once, whatever process comes there first: it leaves a file of its name.
"""

import functools
import importlib
import importlib.machinery
import json
import os
import signal
import sys
from pathlib import Path

VARIABLE = "FAILPOINTS"


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
    """Wraps the functions of a module when it has been imported."""

    def __init__(self, folder, points):
        self._folder = folder
        self._points = points

    def find_spec(self, name, path=None, target=None):
        points = [point for point in self._points if point["function"].partition(":")[0] == name]
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if points else None
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                for point in points:
                    _wrap(module, self._folder, point)

            spec.loader.exec_module = exec_module
        return spec


def _install(given):
    folder, points = Path(given["folder"]), given["points"]
    # What has struck once does not strike again; nor does its wrapper count any more.
    points = [point for point in points if not (folder / point["name"]).exists()]
    for point in points:
        module = point["function"].partition(":")[0]
        if module in sys.modules:
            _wrap(sys.modules[module], folder, point)
    sys.meta_path.insert(0, _Finder(folder, [p for p in points if p["function"].partition(":")[0] not in sys.modules]))


if VARIABLE in os.environ:
    _install(json.loads(os.environ[VARIABLE]))
