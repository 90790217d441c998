"""`rocket-uniform`: the paper's factorization with every layer at the same ratio, and nothing allocated."""

from rocket_core.methods.rocket import Rocket


class RocketUniform(Rocket):
    """The paper's ablation without its allocation (marked with a dagger in its tables).

    References:
        ROCKET, tables 1 and 5.
    """

    uniform = True
