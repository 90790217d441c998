"""A progress bar for people who call the library in a terminal or a notebook."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm

from rocket_core.config import stage_label
from rocket_core.pipeline.observer import Observer, Progress
from rocket_core.report.notebook import notebook_shell

_STEPS = 1000
_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


class _Bar(Observer):
    """Observer that draws a bar."""

    def __init__(self, bar: "tqdm[None]") -> None:
        self._bar = bar

    def on_progress(self, progress: Progress) -> None:
        """Draw the step; the bar itself is drawn a few times a second, a new stage at once."""
        stage = stage_label(progress.stage)
        begins = self._bar.desc != stage
        self._bar.set_description_str(stage, refresh=False)
        self._bar.set_postfix_str(progress.layer or "", refresh=False)
        self._bar.update(round(_STEPS * progress.fraction) - self._bar.n)
        if begins:
            self._bar.refresh()


@contextmanager
def shown(observer: Observer | None) -> Iterator[Observer]:
    """Yield the given observer, or one that draws a bar if a person looks on, or one that does nothing."""
    if observer is not None:
        yield observer
    elif not is_watched():
        yield Observer()
    else:
        with tqdm(total=_STEPS, desc="starting", bar_format=_FORMAT, leave=False) as bar:
            yield _Bar(bar)


def is_watched() -> bool:
    """Return whether a person looks on: standard error is a terminal, or the code runs in a notebook."""
    return sys.stderr.isatty() or notebook_shell() is not None
