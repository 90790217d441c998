"""What an engine predicts at a place, out of its logits."""

import numpy as np
from jaxtyping import Float32

from rocket_core.errors import RocketError
from rocket_core.speed.messages import Likeliest

LIKELIEST = 16
"""Number of tokens whose probabilities are compared at a place."""


def likeliest(logits: Float32[np.ndarray, " vocabulary"], engine: str) -> Likeliest:
    """Return the likeliest tokens.

    Args:
        logits: the logits of all tokens.
        engine: name of the engine in messages.

    Raises:
        RocketError: a logit is not finite.
    """
    if not np.isfinite(logits).all():
        raise RocketError(f"{engine} predicts numbers that are not finite")
    exact = logits.astype(np.float64)
    exact -= exact.max()
    exact -= np.log(np.exp(exact).sum())
    tokens = np.argsort(-exact, kind="stable")[:LIKELIEST]
    return Likeliest(tokens=tuple(tokens.tolist()), log_probabilities=tuple(exact[tokens].tolist()))
