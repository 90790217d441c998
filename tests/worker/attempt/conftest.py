"""Fixtures for attempts at jobs that are submitted over HTTP."""

import pytest

from app.main import create_app
from app.services import admission
from tests.app.conftest import local_client


@pytest.fixture
def client(settings):
    app = create_app(settings)
    with local_client(app) as client:
        yield client
    # Other tests of this process may hold it.
    admission._processes.close()
