"""`rocket-uniform`: the paper's factorization with every layer at the same ratio, without allocation."""

from rocket_core.config import CompressionConfig
from rocket_core.methods.rocket import Rocket


class RocketUniform(Rocket):
    """The paper's ablation without its allocation (marked with a dagger in its tables).

    It uses only the paper's kinds of candidates, dictionary and coefficients, regardless of the kinds in the settings.

    References:
        ROCKET, tables 1 and 5.
    """

    uniform = True

    def __init__(self, config: CompressionConfig, itemsize: int) -> None:
        super().__init__(config.model_copy(update={"kinds": ("low_rank", "factored")}), itemsize)
