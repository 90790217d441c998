import shutil
import socket
import threading
import time

import pytest
from pydantic import SecretStr

from app.main import create_app
from app.services import health
from app.shared.database import Database, downgrade
from tests.app.conftest import local_client

pytestmark = pytest.mark.databases("sqlite", "postgres")


def test_a_healthy_service_reports_ok(client):
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ok", "broker": "in this process"}


def test_a_service_without_schema_is_alive_but_not_ready(client, settings):
    downgrade(settings.database, "base")
    assert client.get("/healthz").status_code == 200
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
    assert answer.json()["missing"][0].startswith("database")


def test_a_service_without_database_is_alive_but_not_ready(settings):
    broken = settings.model_copy(update={"database_url": type(settings.broker_url)("sqlite:////nowhere/x.sqlite3")})
    with local_client(create_app(broken)) as client:
        assert client.get("/healthz").status_code == 200
        assert client.get("/readyz").status_code == 503


def test_a_service_on_a_full_disk_is_not_ready(client, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=2**20))
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["missing"]) == (503, ["data folder: its disk is full"])


@pytest.fixture
def silent_port():
    """Yield a port with a listener that never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.mark.parametrize("broker", ["down", "silent"])
def test_a_service_without_broker_is_ready_and_reports_it_soon(settings, closed_port, silent_port, broker):
    port = closed_port if broker == "down" else silent_port
    lonely = settings.model_copy(update={"broker_url": SecretStr(f"redis://:canary@127.0.0.1:{port}/0")})
    with local_client(create_app(lonely)) as client:
        began = time.monotonic()
        answer = client.get("/readyz")
        assert time.monotonic() - began < 4
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")
        assert answer.json()["broker"].startswith("unreachable")
        assert answer.json()["broker"].endswith("workers poll")
        assert "canary" not in answer.text


def test_a_hanging_database_makes_the_service_not_ready(client, monkeypatch):
    release = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(Database, "is_current", lambda _self: release.wait(30))
        patch.setattr(health, "_SECONDS", 0.5)
        began = time.monotonic()
        for _ in range(2):
            answer = client.get("/readyz")
            assert (answer.status_code, answer.json()["missing"]) == (503, ["database: it does not answer"])
        assert time.monotonic() - began < 15
        assert client.get("/healthz").status_code == 200
        release.set()
    until = time.monotonic() + 20
    while client.get("/readyz").status_code != 200:
        assert time.monotonic() < until


def test_readiness_lists_everything_that_is_missing(client, settings):
    downgrade(settings.database, "base")
    settings.data_dir.rename(settings.data_dir.with_name("elsewhere"))
    answer = client.get("/readyz")
    assert [fault.partition(":")[0] for fault in answer.json()["missing"]] == [
        "database",
        "data folder",
        "artifact store",
    ]
    assert answer.json()["broker"] == "in this process"


def test_readiness_names_a_store_that_does_not_answer(settings, bucket, s3_settings):
    with socket.socket() as hanging:
        hanging.bind(("127.0.0.1", 0))
        hanging.listen()
        away = s3_settings | {"s3_endpoint_url": f"http://127.0.0.1:{hanging.getsockname()[1]}"}
        with local_client(create_app(settings.model_copy(update=away))) as client:
            began = time.monotonic()
            answer = client.get("/readyz")
            assert time.monotonic() - began < 5
    assert (answer.status_code, answer.json()["missing"]) == (503, ["artifact store: it does not answer"])


def test_a_service_that_reaches_its_store_is_ready(settings, s3_settings):
    with local_client(create_app(settings.model_copy(update=s3_settings))) as client:
        assert client.get("/readyz").status_code == 200
