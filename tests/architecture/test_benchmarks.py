"""What benchmarks change in the library has the names that it has there."""

from benchmarks.device_time import _CONSTANTS


def test_the_model_of_time_divides_constants_that_exist():
    named = [(module, name) for modules in _CONSTANTS.values() for module, names in modules.items() for name in names]
    missing = [name for module, name in named if not isinstance(getattr(module, name, None), int)]
    assert missing == []
