"""Progress and cancellation of a download, by way of the progress bars of the Hub's client."""

import threading
from typing import Any

from huggingface_hub.utils import tqdm

from rocket_core.errors import CompressionCancelledError


class Transfer:
    """Bytes that have arrived, counted by the threads of a download and read by another thread.

    Attributes:
        total: bytes expected; 0 while unknown.
    """

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()
        self._counts: dict[int, int | float] = {}
        self._stopped = threading.Event()

    @property
    def done(self) -> int:
        """Bytes that have arrived so far."""
        # One bar counts bytes received, another bytes written; if both are used, one lags.
        with self._lock:
            return int(max(self._counts.values(), default=0))

    @property
    def share(self) -> float:
        """Fraction of the bytes that has arrived, [0, 1]."""
        return min(1.0, self.done / self.total) if self.total else 0.0

    def stop(self) -> None:
        """Stop the download at the next piece that arrives."""
        self._stopped.set()

    def count(self, bar: int, size: int | float) -> None:
        """Record that bytes have arrived; negative if the client starts over.

        Raises:
            CompressionCancelledError: the download was stopped.
        """
        if self._stopped.is_set():
            raise CompressionCancelledError("cancelled while downloading")
        with self._lock:
            self._counts[bar] = self._counts.get(bar, 0) + size

    def bars(self) -> type[tqdm]:
        """Return a progress bar class for the Hub's client that shows nothing and counts bytes."""
        transfer = self

        class Bar(tqdm):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]
                self._counts_bytes = options.get("unit") == "B"

            def update(self, n: int | float | None = 1) -> bool | None:
                if self._counts_bytes:
                    transfer.count(id(self), n or 0)
                return None

        return Bar
