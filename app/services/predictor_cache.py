"""Profiles that are held in memory, as a person who moves a slider asks about one again and again."""

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from app.shared.models import Profile

if TYPE_CHECKING:
    from rocket_core.allocation.predictor import WhatIf

# One of hundreds of layers takes a tenth of a second to read, and tens of megabytes once it is read.
_HELD = 4


class WhatIfs:
    """The profiles that were asked about last; they never change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[str, WhatIf] = OrderedDict()

    def of(self, profile: Profile) -> "WhatIf":
        """Answers for a profile.

        Args:
            profile: its row, in an open transaction.
        """
        # Brings numpy, which a process that nobody asks this needs not.
        from rocket_core.allocation.predictor import ModelProfile

        with self._lock:
            held = self._held.get(profile.id)
            if held is not None:
                self._held.move_to_end(profile.id)
                return held
        made = ModelProfile.model_validate(profile.body).what_if()
        with self._lock:
            self._held[profile.id] = made
            while len(self._held) > _HELD:
                self._held.popitem(last=False)
        return made
