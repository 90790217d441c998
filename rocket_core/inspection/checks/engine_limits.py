"""What an engine can run, judged from a model's config.json and headers. Loads no torch."""

from collections.abc import Mapping

from rocket_core.engines import ROCKET, Engine
from rocket_core.errors import InvalidConfigError, UnsupportedArchitectureError
from rocket_core.inspection.headers.model_fields import find_number, named_classes

_SIXTEEN_BITS = 2
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_engine(settings: Mapping[str, object], itemsize: int, engine: Engine, model: str) -> None:
    """Raise an error if the engine cannot run the model.

    Args:
        settings: the content of config.json. If it names no class, that is not judged.
        itemsize: bytes of a stored number.
        engine: the engine.
        model: name of the model in messages.

    Raises:
        UnsupportedArchitectureError: the engine does not run models of this class, or no mixtures that Rocket writes.
        InvalidConfigError: the engine does not run models in this dtype.
    """
    if engine is ROCKET:
        return
    classes = named_classes(settings)
    if classes and not any(name.endswith(engine.classes) for name in classes):
        raise UnsupportedArchitectureError(
            f"{model} is a {', '.join(classes)}. For {engine.title}, Rocket writes models whose class is or ends with "
            f"{', '.join(engine.classes)}; use the engine rocket"
        )
    experts = find_number(settings, _EXPERTS) or 1
    if experts > 1 and not set(classes) & set(engine.mixtures):
        written = f"; those that it does are {', '.join(engine.mixtures)}" if engine.mixtures else ""
        raise UnsupportedArchitectureError(
            f"{model} is a mixture of {experts} experts ({', '.join(classes)}), which Rocket does not write for "
            f"{engine.title}{written}; use the engine rocket"
        )
    if engine.sixteen_bits and itemsize != _SIXTEEN_BITS:
        raise InvalidConfigError(
            f"{engine.title} runs models in 16 bits, and {model} is stored in {8 * itemsize}; set dtype to bfloat16 or "
            "float16"
        )
