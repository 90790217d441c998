import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rocket_core.report.speed import SpeedReport
from rocket_core.speed import SpeedSettings, Subject
from tests.reference.speed import model_speed, speed_report
from tests.reference.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


class Measured:
    """Stands in for the measurement, which starts processes."""

    def __init__(self) -> None:
        self.subjects: Sequence[Subject] = ()
        self.settings: SpeedSettings | None = None

    def __call__(
        self, subjects: Sequence[Subject], settings: SpeedSettings, *, on_step: Callable[[float, str], None]
    ) -> SpeedReport:
        self.subjects, self.settings = subjects, settings
        on_step(0.5, "one, round 1 of 5")
        return speed_report(model_speed("other"))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    stand_in = Measured()
    monkeypatch.setattr("rocket_cli.commands.bench.measure_speed", stand_in)
    return stand_in


def test_result_is_a_table(rocket: Callable, measured: Measured, model: Path) -> None:
    outcome = rocket("bench", model, model)

    assert outcome.code == 0
    assert len(measured.subjects) == 2, "the same model twice shows how much figures vary"
    assert outcome.out.splitlines()[0].startswith("model ")
    assert "Measured in turns" in outcome.out
    assert "Not measured: gguf: llama.cpp is not installed" in outcome.out
    assert "50%: measuring speed, one, round 1 of 5" in outcome.err


def test_json_output_is_only_the_report(rocket: Callable, measured: Measured, model: Path) -> None:
    outcome = rocket("bench", model, "--json")

    assert SpeedReport.model_validate_json(outcome.out) == speed_report(model_speed("other"))
    assert outcome.err == ""


def test_options_reach_the_measurement(rocket: Callable, measured: Measured, model: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    options = "--prompt-tokens 9 --new-tokens 8 --rounds 7 --threads 6 --device cpu"

    rocket("bench", model, tmp_path, *options.split())

    assert measured.settings == SpeedSettings(prompt_tokens=9, new_tokens=8, rounds=7, threads=6, device="cpu")
    assert [subject.name for subject in measured.subjects] == [str(model), str(tmp_path)]
    assert [subject.form for subject in measured.subjects] == ["dense", "gguf"]


@pytest.mark.parametrize(
    ("option", "packing"), [((), "default"), (("--packed",), "packed"), (("--unpacked",), "unpacked")]
)
def test_artifacts_are_held_as_requested(
    rocket: Callable, measured: Measured, model: Path, option: tuple[str, ...], packing: str
) -> None:
    config = model / "config.json"
    dense = config.read_text()
    config.write_text(json.dumps(json.loads(dense) | {"quantization_config": {"quant_method": "rocket"}}))
    try:
        rocket("bench", model, *option)
    finally:
        config.write_text(dense)

    assert [subject.packing for subject in measured.subjects] == [packing]


def test_threads_are_those_of_the_environment(
    rocket: Callable, measured: Measured, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")

    rocket("bench", model)

    assert measured.settings is not None
    assert measured.settings.threads == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/missing/model", "neither a folder nor a repository id"),
        ("model.gguf", "model.gguf does not exist; check the path"),
    ],
)
def test_a_misspelt_model_is_named(rocket: Callable, measured: Measured, model: Path, name: str, message: str) -> None:
    outcome = rocket("bench", model, name)

    assert outcome.code == 3
    assert message in outcome.err
    assert not measured.subjects


def test_a_misspelt_path_is_found_without_torch() -> None:
    code = (
        "import sys\nfrom rocket_cli.main import main\n"
        "try:\n    main(['bench', '/missing/model'])\n"
        "except SystemExit:\n    print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert result.stdout.strip() == "[]"


def test_a_number_out_of_range_is_wrong_usage(rocket: Callable, model: Path) -> None:
    outcome = rocket("bench", model, "--rounds", "0", "--json")

    assert outcome.code == 2
    error: dict[str, Any] = json.loads(outcome.out)["error"]
    assert error["code"] == "invalid_config"
    assert "rounds is 0" in error["message"]


@pytest.mark.slow
def test_a_model_is_really_measured(rocket: Callable, model: Path) -> None:
    outcome = rocket("bench", model, "--rounds", "1", "--threads", "1", "--device", "cpu", "--json")

    report = SpeedReport.model_validate_json(outcome.out)
    assert [(speed.name, speed.form) for speed in report.models] == [(str(model), "dense")]
