import pytest

from rocket_core.config import CompressionConfig, compression_config
from rocket_core.errors import InvalidConfigError


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"ratio": 1.0}, "ratio"),
        ({"ratio": -0.1}, "ratio"),
        ({"ratio": float("nan")}, "ratio"),
        ({}, "ratio"),
        ({"ratio": 0.2, "ration": 0.3}, "ration"),
        ({"ratio": 0.2, "objective": "wight"}, "objective"),
        ({"ratio": 0.2, "export": ()}, "export"),
        ({"ratio": 0.2, "export": ("dense", "dense")}, "export"),
        ({"ratio": 0.2, "calibration": {"samples": 0}}, "calibration.samples"),
        ({"ratio": 0.2, "dtype": "int8"}, "dtype"),
        ({"ratio": 0.2, "ridge": 0.0}, "ridge"),
    ],
)
def test_nonsense_is_refused_by_name(settings, named):
    with pytest.raises(InvalidConfigError, match=named):
        compression_config(**settings)


def test_every_problem_is_named_at_once():
    with pytest.raises(InvalidConfigError, match=r"ratio.*samples"):
        compression_config(ratio=2, calibration={"samples": 0})


def test_settings_survive_json():
    config = compression_config(ratio=0.3, ignore=("*.q_proj",), calibration={"dataset": "builtin", "samples": 4})
    assert CompressionConfig.model_validate_json(config.model_dump_json()) == config


def test_settings_cannot_be_changed_afterwards():
    config = compression_config(ratio=0.3)
    with pytest.raises(ValueError, match="frozen"):
        config.ratio = 0.5
