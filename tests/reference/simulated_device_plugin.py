"""Plugin of pytest that runs the tests on the simulated device: `pytest -p tests.reference.simulated_device_plugin`."""

from tests.reference.simulated_device import install

install()
