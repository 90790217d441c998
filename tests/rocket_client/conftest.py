import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from rocket_client.main import main
from rocket_core.report import CompressionReport
from tests.rocket_client.fakes import FakePipeline, Outcome, build_report


@pytest.fixture
def report() -> CompressionReport:
    return build_report()


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, report: CompressionReport) -> FakePipeline:
    fake = FakePipeline(answer=report)
    module = ModuleType("rocket_core.pipeline")
    module.compress = fake.compress
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
