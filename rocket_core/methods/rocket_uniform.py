"""`rocket-uniform`: the paper's factorization with every layer at the same ratio, and nothing allocated."""

from rocket_core.config import CompressionConfig
from rocket_core.methods.rocket import Rocket


class RocketUniform(Rocket):
    """The paper's ablation without its allocation (marked with a dagger in its tables).

    Of all kinds of candidates it has the paper's, dictionary and coefficients, whatever the settings allow.

    References:
        ROCKET, tables 1 and 5.
    """

    uniform = True

    def __init__(self, config: CompressionConfig, itemsize: int) -> None:
        super().__init__(config.model_copy(update={"kinds": ("low_rank", "factored")}), itemsize)
