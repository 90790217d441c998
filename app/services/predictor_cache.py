"""Cache of profiles in memory, as a user who moves a slider queries the same one repeatedly."""

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from app.shared.models import Profile

if TYPE_CHECKING:
    from rocket_core.allocation.predictor import Predictor

# A profile of hundreds of layers takes a tenth of a second to read, and tens of megabytes in memory.
_HELD = 4


class PredictorCache:
    """The most recently used profiles, which never change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[str, Predictor] = OrderedDict()

    def of(self, profile: Profile) -> "Predictor":
        """Return the predictor of a profile.

        Args:
            profile: its row, in an open transaction.
        """
        # Imports numpy, which a process that never answers such queries does not need.
        from rocket_core.allocation.predictor import ModelProfile

        with self._lock:
            held = self._held.get(profile.id)
            if held is not None:
                self._held.move_to_end(profile.id)
                return held
        made = ModelProfile.model_validate(profile.body).predictor()
        with self._lock:
            self._held[profile.id] = made
            while len(self._held) > _HELD:
                self._held.popitem(last=False)
        return made
