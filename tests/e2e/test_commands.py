"""The commands of the README, run unchanged on the bundled model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rocket_core.evaluation import evaluate_text
from tests.warm_command import WarmCommand

ROOT = Path(__file__).parents[2]
ROCKET = Path(sys.executable).parent / "rocket"
MODEL = "examples/tiny-llama"
TEXT = "examples/tiny-llama/heldout.txt"


def run(*command, code=0):
    result = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == code, result.stderr
    return result


@pytest.fixture(scope="module")
def rocket(tmp_path_factory):
    """Return the command, in processes that need not import what it needs."""
    folder = tmp_path_factory.mktemp("bin")
    command = WarmCommand(folder, os.environ)
    yield folder / "rocket"
    command.close()


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    """Return the bundled model after `rocket compress`, with fewer samples than in the README."""
    out = tmp_path_factory.mktemp("commands") / "out"
    result = run(ROCKET, "compress", MODEL, out, "--ratio", "0.3", "--samples", "8", "--table")
    return out, result


def test_compress_prints_a_table_and_writes_the_artifact(compressed):
    out, result = compressed
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "report.json", "rocket"]
    report = json.loads((out / "report.json").read_text())
    for layer in report["layers"]:
        assert layer["name"].removeprefix("model.layers.") in result.stdout
    assert "30.0% removed" in result.stdout
    assert "import rocket_core.hf" in result.stdout


def test_evaluate_measures_dense_and_compressed_models(rocket, compressed, tmp_path):
    out, _ = compressed
    run(rocket, "export", out / "rocket", tmp_path / "stock", "--to", "dense")
    result = run(rocket, "evaluate", out / "rocket", "--text", TEXT, "--limit", "8", "--json")
    factored = json.loads(result.stdout)["perplexity"]
    # The command's function: a process for each would mostly import.
    dense, composed = (
        evaluate_text(folder, ROOT / TEXT, limit=8).perplexity for folder in (ROOT / MODEL, tmp_path / "stock")
    )
    assert dense < factored < 20 * dense
    assert composed == pytest.approx(factored, rel=0.02)


def test_the_printed_snippet_loads_the_model_and_only_it(compressed):
    out, result = compressed
    printed = result.stdout.split("To load it and generate text:")[1].split("To make a copy")[0]
    snippet = "\n".join(line.strip() for line in printed.splitlines())
    without = f"""
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained({str(out / "rocket")!r})
except RuntimeError as error:
    assert "size" in str(error) or "shape" in str(error)
else:
    raise AssertionError("it loads without rocket_core.hf")
"""
    run(sys.executable, "-W", "error", "-c", f"{without}{snippet}\nassert model.num_parameters() > 0")


@pytest.mark.soak  # The library refuses it in `tests/rocket_core/pipeline/test_resume.py`.
def test_an_existing_result_is_not_overwritten(rocket, compressed):
    out, _ = compressed
    result = run(rocket, "compress", MODEL, out, "--ratio", "0.2", "--samples", "8", code=2)
    assert "choose another output folder" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_verdict_decides_the_exit_code_and_keeps_the_result(rocket, tmp_path):
    small = ["--ratio", "0.3", "--samples", "8", "--profiles", tmp_path / "profiles", "--json", "--no-energy"]
    measured = ["--evaluate", "builtin", "--evaluate-samples", "4", "--evaluate-length", "128"]
    found = {}
    for code, bound in ((0, "0.5"), (10, "0.00001")):
        result = run(rocket, "compress", MODEL, tmp_path / bound, *small, *measured, "--accept-kl", bound, code=code)
        assert (tmp_path / bound / "rocket" / "model.safetensors").is_file()
        assert json.loads((tmp_path / bound / "report.json").read_text()) == json.loads(result.stdout)
        found[bound] = json.loads(result.stdout)["verdict"]
    assert [verdict["outcome"] for verdict in found.values()] == ["accepted", "regressed"]
    assert 0.00001 < found["0.5"]["bounds"][0]["measured"] == found["0.00001"]["bounds"][0]["measured"] < 0.5


def test_mistakes_have_different_exit_codes(rocket, tmp_path):
    cases = [
        (3, [tmp_path / "nowhere", tmp_path / "o", "--ratio", "0.3"]),
        (2, [MODEL, tmp_path / "o", "--ratio", "1.3"]),
        (4, [MODEL, tmp_path / "o", "--ratio", "0.95"]),
        (2, [MODEL, tmp_path / "o", "--ratio", "0.3", "--ignore", "nothing"]),
    ]
    for code, arguments in cases:
        result = run(rocket, "compress", *arguments, code=code)
        assert any(line.startswith(("rocket: error: ", "╭─ Error")) for line in result.stderr.splitlines())
        assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []
