"""Fixtures for tests of clients: a service on the loopback, and the command that talks to it."""

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from app.shared.settings import Settings
from rocket_cli.main import main
from rocket_client import Rocket
from tests.loopback_service import Server, Service
from tests.rocket_cli.fakes import Outcome
from tests.rocket_client.blocking import BlockingAsyncRocket

TINY_LLAMA = Path(__file__).parents[1] / "examples" / "tiny-llama"


def pytest_generate_tests(metafunc):
    if "connect" in metafunc.fixturenames and metafunc.definition.get_closest_marker("both_clients"):
        metafunc.parametrize("connect", (Rocket, BlockingAsyncRocket), ids=("blocking", "asynchronous"))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("ROCKET_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session", autouse=True)
def _joined_servers():
    yield
    Server.join()


@pytest.fixture
def rocket(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the console script's function in this process."""

    def run(*arguments: str | Path) -> Outcome:
        with pytest.raises(SystemExit) as exit_info:
            main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        code = exit_info.value.code
        return Outcome(code=0 if code is None else int(code), out=captured.out, err=captured.err)

    return run


@pytest.fixture
def service(tmp_path, migrated_file):
    """Yield the data of a server: a migrated database, a model, a calibration file."""
    settings = Settings(data_dir=tmp_path / "data", poll_seconds=0.05)
    settings.models_folder.mkdir(parents=True)
    (settings.models_folder / "tiny").symlink_to(TINY_LLAMA)
    settings.datasets_folder.mkdir()
    (settings.datasets_folder / "mine.jsonl").touch()
    shutil.copyfile(migrated_file, settings.database.database)
    service = Service(settings)
    yield service
    service.close()


@pytest.fixture
def server(service):
    with Server(service.settings) as server:
        yield server


@pytest.fixture
def connect():
    """Create clients; `both_clients` makes it create both kinds."""
    return Rocket


@pytest.fixture
def client(server, connect):
    with connect(server.url, patience=5) as client:
        yield client


@pytest.fixture
def remote(rocket, server, monkeypatch):
    """Run a command that finds the server in its environment."""
    monkeypatch.setenv("ROCKET_SERVER", server.url)
    return rocket


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack
