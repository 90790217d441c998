"""What every run on this machine needs: torch, a meter of energy, progress and signals."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from rocket_cli.progress_view import hide_library_bars, progress_view
from rocket_cli.signals import stopping_on_signals
from rocket_core.system.energy import EnergyMeter
from rocket_core.system.gc_pause import no_collection
from rocket_core.system.torch_environment import set_torch_defaults

if TYPE_CHECKING:
    from rocket_cli.terminal_observer import TerminalObserver


@contextmanager
def local_run(*, energy: bool, quiet: bool) -> Iterator[tuple[EnergyMeter | None, "TerminalObserver"]]:
    """Import the library, and yield a run's meter of energy and its observer.

    Args:
        energy: whether energy is measured.
        quiet: whether nothing is shown unless stderr is a terminal.
    """
    set_torch_defaults(os.environ)
    with EnergyMeter() if energy else nullcontext() as meter:
        # This takes seconds, in which the meter gets ready.
        with no_collection(lasting=True):
            from rocket_cli.terminal_observer import TerminalObserver
        hide_library_bars()
        with progress_view(quiet=quiet) as view, stopping_on_signals(view.announce_stop) as stop:
            yield meter, TerminalObserver(view, stop, quiet=quiet)
