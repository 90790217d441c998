"""Processor time of Rocket next to that of llm-compressor's GPTQ with the same windows, as ratios within one run.

    python -m benchmarks.time --model FOLDER --calibrate FILE --measure FILE --out FOLDER --environments FOLDER

Every row is a separate program on one thread, from its start to the written files; evaluation is not counted. GPTQ
rounds to 4 bits in groups of 32 inputs. It writes OUT/time.json and OUT/time.md; saved runs are not repeated; all
should be of one quiet machine. KL is in nats per token. Time in the system is mostly that of page faults.
"""

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measured_runs import saved_runs
from benchmarks.rivals import GROUP_SIZE, PROGRAMS, RIVALS, calibration_windows, interpreter
from rocket_core.evaluation import evaluate_text

GPTQ = "llm-compressor GPTQ"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A compression to be timed.

    Attributes:
        arguments: of `rocket compress`, with {size} for the size asked for.
        most: upper bound on the processor time, as a part of that of GPTQ; None for no bound.
        windows: whether it gets the windows of GPTQ instead of the defaults.
    """

    arguments: str
    most: float | None
    windows: bool = True


ROWS = (
    Row(arguments="--preset fast --bits 4.25 --for vllm", most=0.8),
    Row(arguments="--preset fast --size {size}", most=1.2),
    Row(arguments="--preset fast --size {size} --for llama.cpp", most=1.5),
    Row(arguments="--preset best --size {size}", most=2.5),
    Row(arguments="--preset fast --size {size}", most=None, windows=False),
)


def timed(command: Sequence[str]) -> dict[str, Any]:
    """Run a program on one thread and return its processor time and page faults, those of its children included.

    Raises:
        CalledProcessError: it failed.
    """
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    kept |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=kept, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)  # noqa: S603 - programs of this repository
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, list(command), done.stdout, done.stderr[-2000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    faults = after.ru_minflt - before.ru_minflt
    return {"seconds": user + system, "system": system / (user + system), "faults": faults, "output": done.stdout}


def quality(given: argparse.Namespace, artifact: Path) -> dict[str, Any]:
    """Return KL divergence from the original, and bytes of the files."""
    found = evaluate_text(
        artifact, given.measure, sequence_length=given.measured, limit=given.windows, against=given.model, device="cpu"
    )
    assert found.difference is not None
    files = [file for pattern in ("*.safetensors", "*.gguf") for file in artifact.glob(pattern)]
    return {"kl": found.difference.kl_divergence, "bytes": sum(file.stat().st_size for file in files)}


def run_gptq(given: argparse.Namespace) -> dict[str, Any]:
    """Quantize with GPTQ; its program says what it took until its files were written."""
    with tempfile.TemporaryDirectory() as scratch:
        windows, out = Path(scratch, "windows.json"), Path(scratch, "out")
        windows.write_text(json.dumps(calibration_windows(given, given.model)))
        python = interpreter(RIVALS[GPTQ], given.environments)
        program = str(PROGRAMS / RIVALS[GPTQ].program)
        found = timed([str(python), program, str(given.model), str(windows), "4", str(GROUP_SIZE), str(out)])
        found |= json.loads(found.pop("output").splitlines()[-1])
        return found | quality(given, out / "dense") | {"bytes": (out / "packed" / "model.safetensors").stat().st_size}


def run_rocket(given: argparse.Namespace, row: Row) -> dict[str, Any]:
    """Compress with Rocket."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "out")
        windows = ("--samples", str(given.samples), "--sequence-length", str(given.length)) if row.windows else ()
        found = timed(
            [
                *(str(Path(sys.executable).with_name("rocket")), "compress", str(given.model), str(out)),
                *("--calibration", given.calibrate, *windows),
                *row.arguments.format(size=given.size).split(),
            ]
        )
        del found["output"]
        artifact = next(folder for folder in out.iterdir() if folder.is_dir())
        return found | quality(given, artifact)


def table(rows: Sequence[Mapping[str, Any]], bounds: Mapping[str, float | None]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| | processor seconds | of GPTQ's | asked | in the system | page faults | KL | MB |"
    yield "|---|---|---|---|---|---|---|---|"
    unit = rows[0]["seconds"]
    for row in rows:
        most = bounds.get(row["name"])
        part = row["seconds"] / unit
        asked = "" if most is None else f"at most {most}: {'holds' if part <= most else 'missed'}"
        cells = f"{row['seconds']:.0f} | {part:.2f} | {asked} | {row['system']:.0%} | {row['faults'] / 1e6:.1f} M"
        yield f"| {row['name']} | {cells} | {row['kl']:.4f} | {row['bytes'] / 1e6:.1f} |"


def main() -> None:
    """Run the missing rows, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a decoder")
    parser.add_argument("--calibrate", required=True, help="as `rocket compress --calibration`")
    parser.add_argument("--measure", type=Path, required=True, help="a .txt or .jsonl file")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--environments", type=Path, required=True, help="folder for the environment of llm-compressor")
    parser.add_argument("--size", default="80MB", help="size asked for")
    parser.add_argument("--rows", type=int, nargs="*", default=range(len(ROWS)), help="rows of Rocket, from 0")
    parser.add_argument("--samples", type=int, default=64, help="calibration windows")
    parser.add_argument("--length", type=int, default=256, help="tokens per window")
    parser.add_argument("--windows", type=int, default=24, help="windows measured")
    parser.add_argument("--measured", type=int, default=512, help="tokens of each")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    names: dict[str, Row] = {}
    for row in (ROWS[index] for index in given.rows):
        names[row.arguments.format(size=given.size) + ("" if row.windows else ", default calibration")] = row
    runs: list[tuple[str, int, Callable[[], dict[str, Any]]]] = [(GPTQ, 0, lambda: run_gptq(given))]
    runs += [(name, 0, functools.partial(run_rocket, given, row)) for name, row in names.items()]
    keys = {"model": given.model.resolve().name, "samples": given.samples, "length": given.length}
    rows = saved_runs(given.out / "time.json", keys, runs)
    lines = list(table(rows, {name: row.most for name, row in names.items()}))
    (given.out / "time.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
