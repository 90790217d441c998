"""Sweeps: a few cases that every landing proves, and the others, which `make soak` adds."""

import pytest
from hypothesis import settings


def sweep(kept, *, soak):
    """Return the cases of a parametrized test, of which `make test-all` runs only the kept ones."""
    return [*map(_case, kept), *(_case(case, pytest.mark.soak) for case in soak)]


def _case(case, *marks):
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)


def examples(usual):
    """Return how many random examples to try: far more under the profile of `make soak`."""
    profile = settings.default.max_examples
    return profile if profile > settings.get_profile("default").max_examples else usual
