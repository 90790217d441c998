"""Compression methods by name: `rocket` and the baselines it is compared with.

A method turns a layer's weight and statistics into candidates, and a candidate into factors; calibration, allocation,
formats and everything else are common to all methods.
"""

from collections.abc import Mapping

from rocket_core import config
from rocket_core.config import CompressionConfig
from rocket_core.methods.base import Method
from rocket_core.methods.dictionary_baselines import Cospadi, SvdLlm
from rocket_core.methods.layer_problem import CompressedLayer, CompressedWeight, LayerProblem, Member, output_weights
from rocket_core.methods.pruning_baselines import Magnitude, SparseGpt, Wanda
from rocket_core.methods.rocket import Rocket, RocketUniform
from rocket_core.methods.rounding_baselines import Gptq, Rtn

METHODS: Mapping[config.Method, type[Method]] = {
    "rocket": Rocket,
    "rocket-uniform": RocketUniform,
    "svd-llm": SvdLlm,
    "cospadi": Cospadi,
    "magnitude": Magnitude,
    "wanda": Wanda,
    "sparsegpt": SparseGpt,
    "rtn": Rtn,
    "gptq": Gptq,
}


def method_for(settings: CompressionConfig, itemsize: int) -> Method:
    """Return the method named by the settings.

    Args:
        settings: all settings.
        itemsize: bytes of a stored number.
    """
    return METHODS[settings.method](settings, itemsize)


__all__ = [
    "METHODS",
    "CompressedLayer",
    "CompressedWeight",
    "LayerProblem",
    "Member",
    "Method",
    "method_for",
    "output_weights",
]
