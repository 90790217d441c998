import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from rocket_core.report.schema import CompressionReport
from tests.rocket_cli.fakes import FakePipeline, build_report
from tests.service_fixtures import (  # noqa: F401
    _clean_environment,
    _joined_servers,
    client,
    connect,
    pytest_generate_tests,
    remote,
    rocket,
    server,
    service,
    stack,
)


@pytest.fixture
def report() -> CompressionReport:
    return build_report()


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, report: CompressionReport) -> Iterator[FakePipeline]:
    fake = FakePipeline(answer=report)
    module = ModuleType("rocket_core.pipeline")
    module.compress = fake.compress
    module.ProfileCache = lambda folder: ("kept in", folder)
    module.Observer = module.Progress = object
    monkeypatch.setitem(sys.modules, "rocket_core.pipeline", module)
    monkeypatch.setattr("rocket_cli.local_run.hide_library_bars", lambda: None)
    # It is imported with the fake's classes, or was with the library's.
    sys.modules.pop("rocket_cli.terminal_observer", None)
    yield fake
    sys.modules.pop("rocket_cli.terminal_observer", None)
