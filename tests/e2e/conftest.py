"""Services with the bundled model among those they offer, on SQLite alone or on Postgres and Redis."""

import shutil
from pathlib import Path

import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.service_process import Service

MODEL = Path(__file__).parents[2] / "examples" / "tiny-llama"


@pytest.fixture
def start_service(tmp_path, database_kind, request):
    """Starts services on one data folder; all are gone at the end of the test."""
    started, made = [], []

    def build(data_dir, settings):
        if database_kind == "sqlite":
            return Service(data_dir, **settings)
        server = request.getfixturevalue("postgres")
        made.append((server, server.create()))
        urls = {
            "ROCKET_DATABASE_URL": server.url(made[-1][1]),
            "ROCKET_BROKER_URL": request.getfixturevalue("redis_server").url,
        }
        return Deployment(data_dir, **(urls | settings))

    def start(name="data", **settings):
        data_dir = tmp_path / name
        if not (data_dir / "models" / "tiny-llama").exists():
            shutil.copytree(MODEL, data_dir / "models" / "tiny-llama")
        service = build(data_dir, settings)
        started.append(service)
        return service

    yield start
    for service in started:
        service.close()
    for server, name in made:
        server.drop(name)
