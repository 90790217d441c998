"""Rocket next to llama.cpp's own quantizer, with an importance matrix of the same text, in GGUF files of equal size.

    python -m benchmarks.llama_cpp --out FOLDER --environments FOLDER [--seeds 3] [--model FOLDER --measure FILE]

On first use it builds llama.cpp's programs in the environments' folder, which takes a compiler and twenty minutes of
one core, and unless a model is named trains one there (`examples/train_k_llama.py`, half an hour), whose layers fit
every type of llama.cpp. The model is converted to float16 and written as a GGUF file. For each seed, which draws the
calibration text, llama-imatrix reads the text that Rocket is calibrated on, and llama-quantize makes a file of each
mix; Rocket compresses to the bytes of that file. All files are measured alike: as transformers reads them, against the
dense model, on text that no calibration reads; and as llama.cpp itself computes, by llama-perplexity. It writes
OUT/llama_cpp.json with every run and OUT/llama_cpp.md with the tables; saved runs are not repeated.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from benchmarks.half_precision import copy_in_half_precision
from benchmarks.llama_cpp_programs import Programs, built_programs, check_programs
from benchmarks.measured_runs import Results, mean_and_spread, requirement, saved_runs
from benchmarks.rivals import RivalFailedError
from rocket_core.calibration.datasets import documents, file_documents
from rocket_core.config import compression_config
from rocket_core.errors import RocketError
from rocket_core.evaluation import Measurement, compare_models, open_gguf, open_model, read_text
from rocket_core.exports.gguf_model import plan_gguf
from rocket_core.exports.gguf_writer import GgufSource, write_model
from rocket_core.pipeline import ProfileCache, compress
from rocket_core.report.run_commands import GGUF_NAME

TRAINING = Path(__file__).parents[1] / "examples" / "train_k_llama.py"
REQUIRED = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K")
OTHERS = ("Q4_0", "IQ4_XS", "IQ3_M", "IQ3_XXS", "IQ2_M", "Q3_K_S")
PRESETS = ("fast", "best")
MOST_PART = 0.8
"""Upper bound on the KL divergence, as a part of that of llama.cpp's file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What all runs share.

    Attributes:
        given: the options.
        model: the dense model in float16.
        programs: llama.cpp's.
        scratch: folder for files of this run: the dense model's, and importance matrices.
        profiles: Rocket's profiles, one for each seed and preset.
    """

    given: argparse.Namespace
    model: Path
    programs: Programs
    scratch: Path
    profiles: ProfileCache

    @property
    def dense(self) -> Path:
        """The dense model's GGUF file."""
        return self.scratch / "dense.gguf"

    @property
    def logits(self) -> Path:
        """What the dense model's GGUF file predicts, as llama.cpp computes."""
        return self.scratch / "dense.logits"

    def prepare(self) -> None:
        """Write the files that all measurements need, unless they exist."""
        if not self.dense.exists():
            write_dense(self.model, self.dense)
        if not self.logits.exists():
            self.programs.save_logits(self.dense, self.given.measure, self.given.windows, self.logits)

    def importance(self, seed: int) -> Path:
        """Return the importance matrix of the text that a seed draws."""
        self.prepare()
        matrix = self.scratch / f"importance-{seed}.gguf"
        if not matrix.exists():
            text = self.scratch / f"calibration-{seed}.txt"
            tokens = self.given.samples * self.given.length
            text.write_text(calibration_text(self.model, self.given.calibrate, seed, tokens), encoding="utf-8")
            self.programs.importance(self.dense, text, self.given.samples, matrix)
        return matrix

    def run_llama_cpp(self, mix: str, seed: int) -> dict[str, Any]:
        """Quantize with llama.cpp and measure."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, GGUF_NAME)
            self.programs.quantize(self.dense, self.importance(seed), mix, file)
            return self.measured(file)

    def run_rocket(self, preset: str, size: int, seed: int) -> dict[str, Any]:
        """Compress to a size and measure."""
        config = compression_config(
            preset=preset,
            engine="llama.cpp",
            export=("gguf",),
            target_bytes=size,
            calibration={
                "dataset": str(self.given.calibrate),
                "samples": self.given.samples,
                "sequence_length": self.given.length,
                "seed": seed,
            },
        )
        with tempfile.TemporaryDirectory() as folder:
            compress(str(self.model), Path(folder), config, profiles=self.profiles)
            return self.measured(Path(folder, "gguf", GGUF_NAME))

    def measured(self, file: Path) -> dict[str, Any]:
        """Measure a GGUF file."""
        self.prepare()
        dense = open_model(self.model)
        text = read_text(
            dense, file_documents(self.given.measure), count=self.given.windows, sequence_length=self.given.length
        )
        with tempfile.TemporaryDirectory() as scratch:
            compared = compare_models(
                dense,
                open_gguf(file.parent, dense),
                Measurement(text=text, device=torch.device("cpu")),
                scratch=Path(scratch),
                on_step=lambda _share, _what: None,
            )
        before, after = compared.before.perplexity, compared.after.perplexity
        assert before is not None
        return {
            "bytes": file.stat().st_size,
            "kl": compared.difference.kl_divergence,
            "excess": float("inf") if after is None else after / before - 1,
            "agreement": compared.difference.top1_agreement,
            "kl_in_llama_cpp": self.programs.divergence(file, self.given.measure, self.given.windows, self.logits),
        }


def write_dense(model: Path, file: Path) -> None:
    """Write a model in float16 as a GGUF file."""
    tensors = {name: tensor for part in sorted(model.glob("*.safetensors")) for name, tensor in load_file(part).items()}
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    sources = [
        GgufSource(key=key, shape=tuple(tensor.shape), storage="F16", read=lambda tensor=tensor: tensor)  # type: ignore[misc]
        for key, tensor in tensors.items()
    ]
    write_model(file, plan_gguf(config, model, name=model.name), sources)


def calibration_text(model: Path, dataset: str, seed: int, tokens: int) -> str:
    """Return as many documents as Rocket reads for some tokens, in its order and joined as it joins them."""
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    separator = tokenizer.bos_token or tokenizer.eos_token or ""
    texts: list[str] = []
    for text in documents(dataset, seed=seed):
        texts.append(text)
        tokens -= len(tokenizer(separator + text, add_special_tokens=False, verbose=False)["input_ids"])
        if tokens <= 0:
            break
    # llama.cpp itself adds the first separator.
    return separator.join(texts)


def llama_cpp_name(mix: str) -> str:
    """Return the name of llama.cpp's runs."""
    return f"llama.cpp {mix}"


def rocket_name(preset: str, mix: str) -> str:
    """Return the name of Rocket's runs at the bytes of a mix."""
    return f"rocket {preset}, bytes of {mix}"


def table(results: Results, mixes: Sequence[str], presets: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a Markdown table in which Rocket's rows are compared with llama.cpp's of the same seeds."""
    yield (
        "| | bytes | KL, nats per token | of llama.cpp's | excess perplexity | same likeliest token | "
        "KL in llama.cpp | of llama.cpp's |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for mix in mixes:
        rival = llama_cpp_name(mix)
        for name in (rival, *(rocket_name(preset, mix) for preset in presets)):
            own = name == rival
            cells = [
                f"{max(results.values(name, 'bytes')):,}",
                mean_and_spread(results.values(name, "kl")),
                "" if own else mean_and_spread(results.parts(name, rival)),
                mean_and_spread(results.values(name, "excess")),
                mean_and_spread(results.values(name, "agreement")),
                mean_and_spread(results.values(name, "kl_in_llama_cpp")),
                "" if own else mean_and_spread(results.parts(name, rival, of="kl_in_llama_cpp")),
            ]
            yield f"| {name} | {' | '.join(cells)} |"


def bars(results: Results, mixes: Sequence[str], presets: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a Markdown table of requirements: bound, measured mean, and whether it holds."""
    yield "| | asked | found | |"
    yield "|---|---|---|---|"
    for preset in presets:
        over = []
        for mix in mixes:
            name, rival = rocket_name(preset, mix), llama_cpp_name(mix)
            yield requirement(f"{name}: KL, of that of {rival}", results.parts(name, rival), MOST_PART)
            sizes = zip(results.values(name, "bytes"), results.values(rival, "bytes"), strict=True)
            over += [own / other - 1 for own, other in sizes]
        yield requirement(f"{preset}: bytes exceeded, by a part of them", [max(over)], 0.0)


def trained_model(environments: Path) -> Path:
    """Return the folder of the model that is trained if it does not exist."""
    folder = environments / "k-llama"
    # The last file that training writes.
    if not (folder / "tokenizer_config.json").is_file():
        print(f"training a model in {folder}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, str(TRAINING), str(folder)], check=True)  # noqa: S603 - of this repository
    return folder


def measured_runs(bench: Bench, file: Path, keys: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run what is missing in a file of runs, and return all runs."""
    rows: list[dict[str, Any]] = []
    for seed in range(bench.given.seeds):
        for mix in bench.given.mixes:
            rival = [(llama_cpp_name(mix), seed, lambda m=mix, s=seed: bench.run_llama_cpp(m, s))]
            [theirs] = saved_runs(file, keys, rival)
            ours = [
                (rocket_name(preset, mix), seed, lambda p=preset, n=theirs["bytes"], s=seed: bench.run_rocket(p, n, s))
                for preset in bench.given.presets
            ]
            rows += [theirs, *saved_runs(file, keys, ours)]
    return rows


def compared_runs(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Make what is missing, then run what is missing, and return all runs."""
    programs = given.llama_cpp or built_programs(given.environments)
    check_programs(programs)
    folder = (given.model or trained_model(given.environments)).resolve()
    given.measure = given.measure or folder / "heldout.txt"
    if not given.measure.is_file():
        sys.exit(f"{folder} has no heldout.txt; name a text file: --measure")
    given.out.mkdir(parents=True, exist_ok=True)
    keys = {"model": folder.name, "samples": given.samples, "length": given.length, "windows": given.windows}
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(
            given=given,
            model=copy_in_half_precision(folder, Path(scratch, folder.name)),
            programs=Programs(programs, given.length),
            scratch=Path(scratch),
            profiles=ProfileCache(Path(scratch, "profiles")),
        )
        return measured_runs(bench, given.out / "llama_cpp.json", keys)


def options() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--environments", type=Path, required=True, help="folder for llama.cpp and the trained model")
    parser.add_argument("--model", type=Path, help="folder of a decoder that llama.cpp runs; default: one is trained")
    parser.add_argument("--calibrate", default="builtin", help="as `rocket compress --calibration`")
    parser.add_argument("--measure", type=Path, help="a .txt file; default: heldout.txt in the model's folder")
    parser.add_argument("--llama-cpp", type=Path, help="folder of built programs; default: they are built")
    parser.add_argument("--mixes", choices=REQUIRED + OTHERS, nargs="+", default=REQUIRED)
    parser.add_argument("--presets", choices=PRESETS, nargs="+", default=PRESETS)
    parser.add_argument("--seeds", type=int, default=1, help="number of calibration draws")
    parser.add_argument("--samples", type=int, default=128, help="calibration windows")
    parser.add_argument("--length", type=int, default=256, help="tokens per window")
    parser.add_argument("--windows", type=int, default=96, help="windows measured, fewer if the text ends")
    given = parser.parse_args()
    if given.model is not None and not (given.model / "config.json").is_file():
        parser.error(f"{given.model} is not the folder of a model; name one that has config.json and safetensors")
    if given.measure is not None and not given.measure.is_file():
        parser.error(f"there is no file {given.measure}; name a text file")
    return given


def main() -> None:
    """Run the missing combinations, and write the tables."""
    given = options()
    disable_progress_bar()
    try:
        results = Results(compared_runs(given))
    except RivalFailedError as error:
        sys.exit(f"llama.cpp's programs failed: {error}")
    except RocketError as error:
        sys.exit(f"the model cannot be compared: {error}")
    lines = [*table(results, given.mixes, given.presets), "", *bars(results, given.mixes, given.presets)]
    (given.out / "llama_cpp.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
