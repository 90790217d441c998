import hashlib
import json

import pytest

from rocket_core.config import compression_config
from rocket_core.pipeline import compress
from rocket_core.pipeline.preflight import run_identity
from rocket_core.pipeline.state.work_folder import WorkFolder
from tests.reference.tiny_models import save_tiny_model

RATIO = 0.3


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Return a calibration file of generated text."""
    file = tmp_path_factory.mktemp("text") / "calibration.jsonl"
    words = ["rocket", "atom", "layer", "sparse", "rank", "budget", "gram", "the", "a", "of"]
    lines = [
        json.dumps({"text": " ".join(words[(7 * line + 3 * word * word) % len(words)] for word in range(60))})
        for line in range(40)
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Return complete checkpoints of the tiny families, made once."""
    made = {}

    def make(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp("models") / family
            save_tiny_model(family, made[family])
        return made[family]

    return make


@pytest.fixture(scope="session")
def settings(text):
    """Return settings of a small run with the paper's preset; keywords override."""

    def make(**changes):
        calibration = {"dataset": str(text), "samples": 12, "sequence_length": 32}
        small = {"ratio": RATIO, "calibration": calibration, "preset": "paper", "cap_slack": 0.01}
        if "engine" not in changes:
            small["export"] = ("rocket", "dense")
        return compression_config(**(small | changes))

    return make


@pytest.fixture(scope="session")
def finished(tmp_path_factory, model_folder, settings):
    """Return the output folder and the report of an uninterrupted run of a family."""
    made = {}

    def make(family):
        if family not in made:
            output = tmp_path_factory.mktemp("finished") / family
            made[family] = output, compress(str(model_folder(family)), output, settings())
        return made[family]

    return make


@pytest.fixture(scope="session")
def fingerprint():
    """Return hashes of all weights and configurations under an output folder; only the report contains times."""

    def of(output):
        files = [*output.rglob("*.safetensors"), *output.rglob("config.json"), *output.rglob("*.index.json")]
        return {str(file.relative_to(output)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    return of


@pytest.fixture
def open_work(tmp_path):
    """Open work folders, and release them at the end."""
    made = []

    def make(run, inputs, name="work"):
        made.append(WorkFolder(tmp_path / name))
        made[-1].claim(run_identity(run), inputs)
        return made[-1]

    yield make
    for work in made:
        work.release()
