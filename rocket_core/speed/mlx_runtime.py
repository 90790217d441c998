"""A folder for MLX run by mlx-lm, to see what it predicts."""

import time
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np

from rocket_core.speed.messages import Continue, Continued, Load, Loaded
from rocket_core.speed.predictions import likeliest

INSTALL = "mlx-lm is not installed: pip install mlx-lm"


class MlxModel:
    """A loaded folder.

    Args:
        request: what to load.
    """

    def __init__(self, request: Load) -> None:
        import mlx.core
        import mlx_lm

        began = time.perf_counter()
        self._core = mlx.core
        self._model, self._tokenizer = mlx_lm.load(str(request.subject.path))[:2]
        self.loaded = Loaded(
            vocabulary=self._model.args.vocab_size,
            positions=getattr(self._model.args, "max_position_embeddings", None),
            device=str(mlx.core.default_device()),
            dtype=None,
            seconds=time.perf_counter() - began,
        )

    def continue_text(self, request: Continue) -> Continued:
        """Split a text, and continue a prompt greedily; no token ends the answer."""
        tokens, places = list(request.prompt), []
        for _ in range(request.new_tokens):
            logits = self._model(self._core.array([tokens]))[0, -1].astype(self._core.float32)
            places.append(likeliest(np.array(logits), "MLX"))
            tokens.append(places[-1].tokens[0])
        return Continued(split=tuple(self._tokenizer.encode(request.text)), places=tuple(places))


def installed_version() -> str | None:
    """Return mlx-lm with its version; None if it is not installed."""
    return None if find_spec("mlx_lm") is None else f"mlx-lm {version('mlx-lm')}"
