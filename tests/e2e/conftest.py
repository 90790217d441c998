"""Services with the bundled model among those they offer."""

import shutil
from pathlib import Path

import pytest

from tests.e2e.service_process import Service

MODEL = Path(__file__).parents[2] / "examples" / "tiny-llama"


@pytest.fixture
def start_service(tmp_path):
    """Starts services on one data folder; all are gone at the end of the test."""
    started = []

    def start(name="data", **settings):
        data_dir = tmp_path / name
        if not (data_dir / "models" / "tiny-llama").exists():
            shutil.copytree(MODEL, data_dir / "models" / "tiny-llama")
        service = Service(data_dir, **settings)
        started.append(service)
        return service

    yield start
    for service in started:
        service.close()
