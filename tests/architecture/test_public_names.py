"""Names that other programs may import."""

import inspect
import subprocess
import sys

import pytest

import rocket_client
import rocket_core
import rocket_core.hf
import rocket_core.pipeline

PUBLIC = {
    rocket_core: {
        "CalibrationConfig",
        "CompressionConfig",
        "EvaluationConfig",
        "HealingConfig",
        "RocketError",
        "__version__",
        "compress",
        "compression_config",
        "heal",
        "healing_config",
        "profile_model",
    },
    rocket_core.hf: {"RocketConfig", "RocketHfQuantizer", "attach_factors", "disk_names"},
    rocket_core.pipeline: {
        "Observer",
        "ProfileCache",
        "Progress",
        "compress",
        "evaluate_artifact",
        "heal",
        "profile_model",
    },
    rocket_client: {"AsyncRocket", "Rocket"},
}


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_public_names_are_pinned(module):
    assert set(module.__all__) == PUBLIC[module]
    assert len(module.__all__) == len(set(module.__all__))
    for name in module.__all__:
        assert getattr(module, name) is not None


@pytest.mark.parametrize("module", [rocket_core, rocket_client], ids=lambda module: module.__name__)
def test_an_unknown_name_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match="compres"):
        module.compres  # noqa: B018


def test_importing_the_public_names_loads_no_torch():
    code = (
        "import sys\n"
        "from rocket_core import CompressionConfig, RocketError, compress, profile_model\n"
        "from rocket_client import AsyncRocket, Rocket\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["compress", "heal", "profile_model"])
def test_deferred_functions_have_the_real_signatures(name):
    public, real = getattr(rocket_core, name), getattr(rocket_core.pipeline, name)
    assert inspect.signature(public) == inspect.signature(real)
    assert public.__wrapped__ is real
