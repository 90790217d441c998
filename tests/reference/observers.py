"""Observers of runs made from functions."""

from rocket_core.config import STAGES
from rocket_core.pipeline import Observer

COMPRESSING = [stage for stage in STAGES if stage not in {"healing", "evaluating", "benchmarking"}]
"""Stages of a compression without measurements."""


class Watch(Observer):
    """Observer whose methods are the given functions, by their names."""

    def __init__(self, **functions):
        assert all(hasattr(Observer, name) for name in functions), functions.keys()
        vars(self).update(functions)
