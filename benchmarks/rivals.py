"""Rocket next to llm-compressor's GPTQ and AutoRound at equal bytes, each rival in a separate environment.

    python -m benchmarks.rivals --model FOLDER --calibrate FILE --measure FILE --out FOLDER --environments FOLDER

The environments are made on first use, with pip and this environment's version of torch; if pip would install another
one, the benchmark stops before downloading anything. The rivals quantize the float16 model with the windows that Rocket
is calibrated on. Each row counts the bytes of the linear layers in the saved files, of those of 16 bits per weight;
what a rival saves in float32 counts as 16 bits. Rocket's rows are compressed to the bytes of the rival's row before
them, and all are measured on the same text. It writes OUT/rivals.json and OUT/rivals.md; saved runs are not repeated,
and a rival that fails has its last line of output in the table.
"""

import argparse
import functools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from benchmarks.half_precision import copy_in_half_precision
from benchmarks.measured_runs import block_weights, loss_figures, run, saved_runs, stored_bytes
from rocket_core.calibration.inputs import open_source
from rocket_core.config import CalibrationConfig
from rocket_core.engines import ENGINES
from rocket_core.evaluation import evaluate_text
from rocket_core.models.architecture import build_architecture, read_config
from rocket_core.pipeline import ProfileCache
from rocket_core.system.files import lock

PROGRAMS = Path(__file__).parent / "rival_programs"
GROUP_SIZE = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """How many bits a rival's layers get.

    Attributes:
        title: the scheme in the table.
        bits: of a code.
        part: layers with this in their names get 8 bits; None if all get the same.
    """

    title: str
    bits: int
    part: str | None = None


SCHEMES: Mapping[str, Scheme] = {
    **{str(bits): Scheme(title=f"{bits} bits", bits=bits) for bits in (8, 6, 5, 4, 3, 2)},
    # The layers that get more bits by habit: the last of each feed-forward network, or the attention's.
    "mixed-down": Scheme(title="4 bits, down_proj 8", bits=4, part="down_proj"),
    "mixed-attention": Scheme(title="4 bits, attention 8", bits=4, part="attn"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """A library to compare with.

    Attributes:
        requirement: what pip installs, with spaces between packages.
        program: file that runs in its environment.
        mixes: whether the program gives some layers more bits.
    """

    requirement: str
    program: str
    mixes: bool = False


RIVALS: Mapping[str, Rival] = {
    "llm-compressor GPTQ": Rival(requirement="llmcompressor==0.14.0.1", program="llmcompressor_gptq.py", mixes=True),
    "AutoRound": Rival(requirement="auto-round==0.16.1", program="autoround.py"),
}


class RivalFailedError(Exception):
    """A rival could not be installed or did not finish; the message is its last line of output."""


def interpreter(rival: Rival, environments: Path) -> Path:
    """Return the Python of a rival's environment, which is made if it does not exist.

    Raises:
        RivalFailedError: pip finds no set of packages with this version of torch.
    """
    folder = environments / rival.program.removesuffix(".py")
    environments.mkdir(parents=True, exist_ok=True)
    # Two programs that made it at once would clear what the other has installed.
    with folder.with_suffix(".lock").open("w") as lock_file:
        lock(lock_file.fileno(), wait=True)
        if not (folder / ".finished").exists():
            _make_environment(rival, folder)
    return folder / "bin" / "python"


def _make_environment(rival: Rival, folder: Path) -> None:
    venv.create(folder, with_pip=True, clear=True)
    torch_version = version("torch").partition("+")[0]
    constraint = folder / "constraint.txt"
    constraint.write_text(f"torch=={torch_version}\n")
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "-q", "-c", str(constraint), *rival.requirement.split()]
    planned = output_of([*install, "--dry-run", "--report", str(folder / "plan.json")])
    check_plan(json.loads((folder / "plan.json").read_text()), version("torch"), planned)
    output_of(install)
    (folder / ".finished").touch()


def check_plan(plan: Mapping[str, Any], torch_version: str, output: str) -> None:
    """Raise RivalFailedError if pip would install another torch than this one, or CUDA.

    Args:
        plan: pip's report of a dry run.
        torch_version: version with its local part, such as `2.13.0+cpu`.
        output: what pip printed.
    """
    for package in plan["install"]:
        name, found = package["metadata"]["name"], package["metadata"]["version"]
        if name == "torch" and found != torch_version:
            raise RivalFailedError(f"pip would install torch {found} instead of {torch_version}. {output}")
        # nvidia-ml-py is a few kilobytes of Python.
        if name.startswith(("nvidia-", "cuda-")) and name != "nvidia-ml-py":
            raise RivalFailedError(f"pip would install {name}, a part of CUDA. {output}")


def output_of(command: Sequence[str], *, timeout: float = 3600) -> str:
    """Run a program and return the last line of its output; see `lines_of`."""
    lines = lines_of(command, timeout=timeout)
    return lines[-1] if lines else ""


def lines_of(command: Sequence[str], *, timeout: float = 3600) -> list[str]:
    """Run a program and return the lines of its output that are not blank.

    Raises:
        RivalFailedError: it failed or took too long.
    """
    # `PYTHONPATH` would let packages of this environment into the other.
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    kept |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(  # noqa: S603 - programs of this repository, and pip
            command,
            env=kept,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RivalFailedError(f"it took more than {timeout:.0f} seconds") from None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode < 0:
        raise RivalFailedError(f"it was ended by {signal.Signals(-done.returncode).name}")
    if done.returncode:
        raise RivalFailedError(lines[-1] if lines else f"exit status {done.returncode}")
    return lines


def untouched(folder: Path, layers: Sequence[str]) -> int:
    """Return how many of the layers have a floating-point weight, because the rival left them alone."""
    names = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names |= set(tensors.keys())
    return sum(f"{layer}.weight" in names for layer in layers)


def calibration_windows(given: argparse.Namespace, model: Path, seed: int = 0) -> list[list[int]]:
    """Return the windows of tokens that Rocket is calibrated on."""
    architecture = build_architecture(read_config(model), torch.float32)
    settings = CalibrationConfig(
        dataset=str(given.calibrate), samples=given.samples, sequence_length=given.length, seed=seed
    )
    windows: list[list[int]] = (
        open_source(model, architecture, given.length).draw(settings).tensors["input_ids"].tolist()
    )
    return windows


def run_rival(given: argparse.Namespace, rival: Rival, model: Path, scheme: Scheme) -> dict[str, Any]:
    """Quantize with a rival, and measure; a failure is a row as well."""
    layers = block_weights(model)
    with tempfile.TemporaryDirectory() as scratch:
        windows = Path(scratch, "windows.json")
        windows.write_text(json.dumps(calibration_windows(given, model)))
        out = Path(scratch, "out")
        try:
            python = interpreter(rival, given.environments)
            program = [str(python), str(PROGRAMS / rival.program)]
            sizes = [str(scheme.bits), str(given.group_size)]
            output_of([*program, str(model), str(windows), *sizes, str(out), *([scheme.part] if scheme.part else [])])
        except RivalFailedError as error:
            return {"failure": str(error)}
        found = evaluate_text(
            out / "dense", given.measure, sequence_length=given.length, limit=given.windows, against=model, device="cpu"
        )
        assert found.dense is not None
        assert found.difference is not None
        return {
            "fraction": stored_bytes(out / "packed", list(layers)) / (2 * sum(layers.values())),
            "untouched": untouched(out / "packed", list(layers)),
            "layers": len(layers),
            **loss_figures(found.dense.perplexity, found.perplexity, found.difference),
        }


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table; each row of Rocket is compared with the rival's row before it."""
    encoder = any("drift" in row for row in rows)
    measure = "drift" if encoder else "kl"
    others = "" if encoder else " excess perplexity | same likeliest token |"
    yield f"| | bytes of the linears | {'drift' if encoder else 'KL, nats per token'} | of the rival's |{others}"
    yield "|---" * (4 if encoder else 6) + "|"
    against: float | None = None
    for row in rows:
        if "failure" in row:
            against = None
            yield f"| {row['name']} | does not run: {row['failure']} " + "| " * (2 if encoder else 4) + "|"
            continue
        part = ""
        if row["name"].startswith("rocket"):
            part = f"{row[measure] / against:.3g}" if against else ""
        else:
            against = row[measure]
        skipped = f" ({row['untouched']} of {row['layers']} layers left alone)" if row.get("untouched") else ""
        cells = "" if encoder else f" {row['excess']:.4g} | {row['agreement']:.4g} |"
        yield f"| {row['name']}{skipped} | {row['fraction']:.4f} | {row[measure]:.4g} | {part} |{cells}"


def compare(
    given: argparse.Namespace,
    saved: Callable[[Sequence[tuple[str, int, Callable[[], dict[str, Any]]]]], list[dict[str, Any]]],
    model: Path,
    rival_name: str,
    scheme: Scheme,
    profiles: ProfileCache,
) -> list[dict[str, Any]]:
    """Return the row of a rival, and unless it fails, that of Rocket at the same bytes.

    Args:
        given: the arguments of this program.
        saved: `saved_runs` with its first two arguments.
        model: the model in float16.
        rival_name: key of `RIVALS`.
        scheme: bits of the rival's layers.
        profiles: cache for Rocket's profiles.
    """
    rival = RIVALS[rival_name]
    grouped = "" if given.group_size == GROUP_SIZE else f", groups of {given.group_size}"
    title = f"{rival_name}, {scheme.title}{grouped}"
    theirs = saved([(title, 0, lambda: run_rival(given, rival, model, scheme))])
    if "failure" in theirs[0]:
        return theirs
    # Rounded up, so that Rocket never has more bytes.
    ratio = math.ceil(1e6 * (1 - theirs[0]["fraction"])) / 1e6
    settings = {"preset": given.preset, "engine": given.engine, "budget": "bytes", "ratio": max(0.0, ratio)}
    reader = "" if given.engine == "rocket" else f" for {given.engine}"
    ours = f"rocket {given.preset}{reader}, bytes of {title}"
    return theirs + saved([(ours, 0, lambda: run(given, model, settings, 0, profiles))])


def main() -> None:
    """Run the missing combinations, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a decoder or an encoder")
    parser.add_argument("--calibrate", required=True, help="as `rocket compress --calibration`")
    parser.add_argument("--measure", type=Path, required=True, help="a .txt or .jsonl file")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--environments", type=Path, required=True, help="folder for the rivals' environments")
    parser.add_argument("--rivals", choices=list(RIVALS), nargs="+", default=list(RIVALS))
    parser.add_argument(
        "--schemes", choices=list(SCHEMES), nargs="+", default=["8", "4", "3"], help="bits of the rivals' layers"
    )
    parser.add_argument("--preset", choices=("fast", "best", "max"), default="best", help="preset of Rocket")
    parser.add_argument("--engine", choices=list(ENGINES), default="rocket", help="engine that Rocket compresses for")
    parser.add_argument("--group-size", type=int, default=32, help="inputs of the rivals that share a scale")
    parser.add_argument("--samples", type=int, default=128, help="calibration windows")
    parser.add_argument("--length", type=int, default=256, help="tokens per window")
    parser.add_argument("--windows", type=int, default=96, help="windows measured")
    given = parser.parse_args()
    for path in (given.model / "config.json", given.measure):
        if not path.is_file():
            parser.error(f"there is no file {path}")
    if sys.prefix == sys.base_prefix:
        print("note: not in a virtual environment; the rivals get their own nevertheless", file=sys.stderr)
    given.out.mkdir(parents=True, exist_ok=True)
    name = given.model.resolve().name
    keys = {"model": name, "samples": given.samples, "windows": given.windows}
    saved = functools.partial(saved_runs, given.out / "rivals.json", keys)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = copy_in_half_precision(given.model, Path(scratch, name))
        profiles = ProfileCache(Path(scratch, "profiles"))
        for rival_name in given.rivals:
            rival = RIVALS[rival_name]
            schemes = [SCHEMES[name] for name in given.schemes]
            for scheme in [scheme for scheme in schemes if rival.mixes or scheme.part is None]:
                rows += compare(given, saved, model, rival_name, scheme, profiles)
    lines = list(table(rows))
    (given.out / "rivals.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
