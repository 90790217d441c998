import shutil

import pytest

from app.main import create_app
from app.shared.database import downgrade
from tests.app.conftest import local_client

pytestmark = pytest.mark.databases("sqlite", "postgres")


def test_a_healthy_service_says_so(client):
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ok", "broker": "in this process"}


def test_a_service_without_its_schema_lives_but_is_not_ready(client, settings):
    downgrade(settings.database, "base")
    assert client.get("/healthz").status_code == 200
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
    assert answer.json()["missing"][0].startswith("database")


def test_a_service_without_its_database_lives_but_is_not_ready(settings):
    broken = settings.model_copy(update={"database_url": type(settings.broker_url)("sqlite:////nowhere/x.sqlite3")})
    with local_client(create_app(broken)) as client:
        assert client.get("/healthz").status_code == 200
        assert client.get("/readyz").status_code == 503


def test_a_service_on_a_full_disk_is_not_ready(client, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=2**20))
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["missing"]) == (503, ["data folder: its disk is full"])
