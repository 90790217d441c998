"""Every command of the quickstart and how-to pages, run unchanged and in order with a real service.

Two people type them at the same time; `rocket` is forked from a process that has imported everything.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.service_process import QUICK, Service
from tests.warm_command import WarmCommand

# Some commands use curl.
pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny-llama"
# For each person, in the order in which the pages refer to one another.
OF_ENGINES = ("how-to/engines", "how-to/speed")
READ_IN_TURN = (
    "index",
    "quickstart",
    "how-to/index",
    "how-to/compress",
    "how-to/service",
    "how-to/calibration",
    "how-to/upload",
    "how-to/ratio",
    "how-to/mixtures",
    "how-to/few-bits",
    "how-to/vision",
    "how-to/speech",
    "how-to/load",
    "how-to/evaluate",
    "how-to/heal",
    "how-to/gpu",
    "how-to/cost",
    "how-to/hub",
    "how-to/containers",
    "how-to/isolation",
    "how-to/production",
    "how-to/webhooks",
    "how-to/agents",
    "how-to/audit",
)
READERS = [[ROOT / "docs" / f"{name}.md" for name in names] for names in (READ_IN_TURN, OF_ENGINES)]
PAGES = [page for pages in READERS for page in pages]
BLOCK = re.compile(r"(?:<!-- not run: ([^>]+) -->\n)?```(sh|python|bash|console|shell)\n(.*?)```", flags=re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"
# Shortens what takes long and does not affect whether a command works.
SHORTER = {
    "--samples 64 --sequence-length 256": "--samples 8 --sequence-length 64",
    '"samples": 64, "sequence_length": 256': '"samples": 8, "sequence_length": 64',
    "--evaluate-samples 16": "--evaluate-samples 2",
    "--tokens 2M": "--tokens 20k",
    "--heal 2M": "--heal 20k",
    # Less than the cut model takes.
    "--size 4MB": "--size 1.3MB",
    "--size 1.6MB": "--size 1.2MB",
    "--fit 5.5MB": "--fit 4.2MB",
}
BLOCKS_OF_THE_MODEL = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block of commands; `reason` says why it is not run, and is empty if it is."""

    language: str
    text: str
    reason: str


def blocks(page):
    return [
        Block(language=language, text=text, reason=reason) for reason, language, text in BLOCK.findall(page.read_text())
    ]


def script_of(page):
    """Return one script of what a page has one type; consecutive blocks of Python are typed into one process."""
    run = [block for block in blocks(page) if not block.reason]
    parts = []
    for language, together in itertools.groupby(run, key=lambda block: block.language):
        text = "\n".join(block.text for block in together)
        parts.append(text if language == "sh" else f"python - <<'END_OF_PYTHON'\n{text}END_OF_PYTHON\n")
    script = "\n".join(parts)
    for text, shorter in SHORTER.items():
        script = script.replace(text, shorter)
    return script


def cut_model(source, target):
    """Return the bundled model without most of its blocks, so that every command is quick."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    config["num_hidden_layers"] = BLOCKS_OF_THE_MODEL
    config.pop("layer_types", None)
    (target / "config.json").write_text(json.dumps(config))
    [weights] = target.glob("*.safetensors")
    tensors = load_file(weights)
    left = {
        name: tensor
        for name, tensor in tensors.items()
        if not (found := re.match(r"model\.layers\.(\d+)\.", name)) or int(found[1]) < BLOCKS_OF_THE_MODEL
    }
    assert len(left) < len(tensors)
    save_file(left, weights, metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the files of a clone that the pages name, and a service's data folder."""
    (tmp_path / "examples").mkdir()
    cut_model(MODEL, tmp_path / "examples" / MODEL.name)
    (tmp_path / "rocket-data" / "models").mkdir(parents=True)
    shutil.copytree(tmp_path / "examples" / MODEL.name, tmp_path / "rocket-data" / "models" / MODEL.name)
    return tmp_path


@pytest.fixture
def service(folder):
    running = Service(folder / "rocket-data")
    yield running
    running.close()


@pytest.fixture
def environment(service, tmp_path_factory):
    """Return variables with `rocket` and `python` of the tests' environment, and nothing of the operator's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROCKET_", "HF_TOKEN"))}
    warm = tmp_path_factory.mktemp("bin")
    paths = str(warm), str(Path(sys.executable).parent), os.environ["PATH"]
    variables = kept | {
        "OMP_NUM_THREADS": QUICK["OMP_NUM_THREADS"],
        "PATH": os.pathsep.join(paths),
        "ROCKET_SERVER": service.url,
    }
    command = WarmCommand(warm, variables)
    yield variables
    command.close()


def test_all_commands_work_as_typed(folder, service, environment):
    def typed(pages):
        script = "\n".join(f": {page.name}\n{script_of(page)}" for page in pages)
        return subprocess.run(
            # Prints each command on standard error before running it.
            ["bash", "-euxo", "pipefail", "-c", script.replace(ADDRESS, service.url)],
            check=False,
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment,
            timeout=1500,
        )

    with ThreadPoolExecutor() as pool:
        results = list(pool.map(typed, READERS))
    for result in results:
        assert result.returncode == 0, result.stderr[-3000:]
        assert "Traceback" not in result.stderr
    for found in ("out", "smaller", "smaller-too"):
        assert (folder / found / "rocket" / "model.safetensors").is_file()


def test_every_page_is_tested_and_exceptions_have_reasons():
    assert {page.resolve() for page in (ROOT / "docs" / "how-to").glob("*.md")} <= {page.resolve() for page in PAGES}
    # A prompt in front of a command cannot be copied.
    assert not [page for page in PAGES for block in blocks(page) if re.search(r"^\$ ", block.text, flags=re.MULTILINE)]
    assert {block.language for page in PAGES for block in blocks(page)} == {"sh", "python"}
    run = [page.stem for page in PAGES if script_of(page)]
    first = ["quickstart", "compress", "service", "calibration", "upload", "ratio", "load", "evaluate"]
    assert run == [*first, "heal", "cost", "webhooks", "audit", "engines", "speed"]


def test_untested_commands_exist():
    import typer

    from rocket_cli.main import app

    known = typer.main.get_command(app).commands
    for page in PAGES:
        if "% TODO verify" in page.read_text():
            continue
        for block in blocks(page):
            for name in re.findall(r"(?<![/\w])rocket (?!-)([a-z]+)", block.text if block.language != "python" else ""):
                assert name in known, (page, name)
