"""A progress bar for people who call the library in a terminal or a notebook."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm

from rocket_core.config import stage_label
from rocket_core.pipeline.progress import Progress
from rocket_core.report.notebook import notebook_shell

_STEPS = 1000
_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


@contextmanager
def shown_progress(on_progress: Callable[[Progress], None] | None) -> Iterator[Callable[[Progress], None]]:
    """Yield what is to be called at every step: the given function, or a bar if a person looks on, or nothing.

    Args:
        on_progress: the caller's function; None for a bar.
    """
    if on_progress is not None:
        yield on_progress
    elif not is_watched():
        yield lambda _progress: None
    else:
        with tqdm(total=_STEPS, desc="starting", bar_format=_FORMAT, leave=False) as bar:
            yield lambda progress: _show(bar, progress)


def is_watched() -> bool:
    """Return whether a person looks on: standard error is a terminal, or the code runs in a notebook."""
    return sys.stderr.isatty() or notebook_shell() is not None


def _show(bar: "tqdm[None]", progress: Progress) -> None:
    stage = stage_label(progress.stage)
    begins = bar.desc != stage
    bar.set_description_str(stage, refresh=False)
    bar.set_postfix_str(progress.layer or "", refresh=False)
    bar.update(round(_STEPS * progress.fraction) - bar.n)
    if begins:
        # Otherwise the bar is drawn a few times a second.
        bar.refresh()
