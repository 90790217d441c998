import os
import resource
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest

from app.main import create_app
from app.shared.settings import Settings
from rocket_client import Rocket
from rocket_client.main import main
from rocket_core.report import CompressionReport
from tests.rocket_client.blocking import BlockingAsyncRocket
from tests.rocket_client.fakes import FakePipeline, Outcome, build_report
from tests.rocket_client.service import Server, Service
from tests.rocket_client.sockets import Connection, LimitedServer

TINY_LLAMA = Path(__file__).parents[2] / "examples" / "tiny-llama"


def pytest_configure(config):
    config.addinivalue_line("markers", "both_clients: runs on the blocking and on the asynchronous client")


def pytest_generate_tests(metafunc):
    if "connect" in metafunc.fixturenames and metafunc.definition.get_closest_marker("both_clients"):
        metafunc.parametrize("connect", (Rocket, BlockingAsyncRocket), ids=("blocking", "asynchronous"))


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("ROCKET_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session", autouse=True)
def _no_server_is_left():
    yield
    Server.join()


@pytest.fixture
def report() -> CompressionReport:
    return build_report()


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, report: CompressionReport) -> FakePipeline:
    fake = FakePipeline(answer=report)
    module = ModuleType("rocket_core.pipeline")
    module.compress = fake.compress
    module.KeptProfiles = lambda folder: ("kept in", folder)
    monkeypatch.setitem(sys.modules, "rocket_core.pipeline", module)
    monkeypatch.setattr("rocket_client.compress.hide_library_bars", lambda: None)
    return fake


@pytest.fixture
def rocket(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs the console script's function in this process."""

    def run(*arguments: str | Path) -> Outcome:
        with pytest.raises(SystemExit) as exit_info:
            main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        code = exit_info.value.code
        return Outcome(code=0 if code is None else int(code), out=captured.out, err=captured.err)

    return run


@pytest.fixture
def service(tmp_path, migrated_file):
    """What lies behind a server: a migrated database, a model, a calibration file."""
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
    """Makes clients; `both_clients` has it make those of either kind."""
    return Rocket


@pytest.fixture
def client(server, connect):
    with connect(server.url, patience=5) as client:
        yield client


@pytest.fixture
def remote(rocket, server, monkeypatch):
    """Runs a command that finds the server in its environment."""
    monkeypatch.setenv("ROCKET_SERVER", server.url)
    return rocket


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def serve(service, stack, monkeypatch):
    """Starts servers; the limit on descriptors of this process stays as it is."""
    monkeypatch.setattr(resource, "setrlimit", lambda *_arguments: None)

    def serve(**settings):
        server = LimitedServer(create_app(service.settings.model_copy(update=settings)))
        stack.callback(server.stop)
        return server

    return serve


@pytest.fixture
def dial(stack):
    def dial(server, **options):
        connection = Connection(server.address, **options)
        stack.callback(connection.close)
        return connection

    return dial
