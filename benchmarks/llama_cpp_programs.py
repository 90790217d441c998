"""llama.cpp's own programs: built from the source that `llama-cpp-python` ships, and run on one thread."""

import os
import re
import shutil
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.rivals import RivalFailedError, lines_of

SOURCE = "llama-cpp-python==0.3.36"
NAMES = ("llama-imatrix", "llama-quantize", "llama-perplexity")
_SECONDS = 2 * 3600
_ATTEMPTS = 3
# Without what these programs do not need, and with everything in one file each. Not for the processor that builds them
# alone: they are kept, and another one ends them at the first instruction that it lacks.
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DGGML_OPENMP=OFF",
    "-DGGML_NATIVE=OFF",
)
_ONE_THREAD = ("--threads", "1", "--gpu-layers", "0")
_KL_DIVERGENCE = re.compile(r"Mean\s+KLD:\s*(-?[\d.]+(?:e-?\d+)?)")


def built_programs(environments: Path) -> Path:
    """Return the folder with the programs, which are built if they do not exist: twenty minutes on one core.

    Args:
        environments: folder for what benchmarks install.

    Raises:
        RivalFailedError: the source cannot be downloaded or built.
    """
    folder = environments / "llama.cpp"
    programs = folder / "build" / "bin"
    finished = folder / ".finished"
    if finished.exists():
        return programs
    missing = [tool for tool in ("cmake", "c++", "make") if shutil.which(tool) is None]
    if missing:
        raise RivalFailedError(
            f"building llama.cpp needs {missing[0]}; install it, or name built programs: --llama-cpp"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"building llama.cpp in {folder}", file=sys.stderr, flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    lines_of([*pip, "--dest", str(folder), SOURCE])
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    source = next(folder.glob("*/vendor/llama.cpp"))
    build = folder / "build"
    lines_of(["cmake", "-S", str(source), "-B", str(build), *_OPTIONS])
    jobs = str(os.cpu_count() or 1)
    lines_of(["cmake", "--build", str(build), "--parallel", jobs, "--target", *NAMES], timeout=_SECONDS)
    finished.touch()
    return programs


def check_programs(folder: Path) -> None:
    """Raise RivalFailedError if a program is missing in a folder."""
    for name in NAMES:
        if not (folder / name).is_file():
            raise RivalFailedError(f"{folder} has no {name}; name the folder of llama.cpp's programs, build/bin")


class Programs:
    """The programs of a folder.

    Args:
        folder: the folder.
        length: tokens per window.
        run: runs a command and returns the lines of its output.
    """

    def __init__(self, folder: Path, length: int, run: Callable[[Sequence[str]], list[str]] = lines_of) -> None:
        self._folder = folder
        self._length = str(length)
        self._run = run

    def importance(self, model: Path, text: Path, windows: int, out: Path) -> None:
        """Write the importance matrix of a model.

        Args:
            model: the dense GGUF file.
            text: text in which the tokenizer's special tokens are recognised.
            windows: windows that are read from its beginning.
            out: the file.
        """
        read = ["--file", str(text), "--parse-special", "--chunks", str(windows), "--no-ppl"]
        self._call("llama-imatrix", "--model", str(model), *read, *self._context(), "--output-file", str(out))
        if not out.is_file():
            raise RivalFailedError("llama-imatrix wrote no file; the text may be shorter than the windows asked for")

    def quantize(self, model: Path, importance: Path, mix: str, out: Path) -> None:
        """Quantize a dense GGUF file to one of llama.cpp's mixes of types, such as Q4_K_M."""
        self._call("llama-quantize", "--imatrix", str(importance), str(model), str(out), mix, "1")

    def save_logits(self, model: Path, text: Path, windows: int, out: Path) -> None:
        """Write what a dense GGUF file predicts, as `divergence` reads it."""
        self._perplexity(model, text, windows, "--kl-divergence-base", str(out))

    def divergence(self, model: Path, text: Path, windows: int, logits: Path) -> float:
        """Return the mean KL divergence from saved logits, in nats per token, as llama.cpp computes.

        It counts the second half of each window.
        """
        lines: list[str] = []
        # Its log is written by another thread, whose last lines are sometimes lost when it ends.
        for _ in range(_ATTEMPTS):
            lines = self._perplexity(model, text, windows, "--kl-divergence-base", str(logits), "--kl-divergence")
            found = _KL_DIVERGENCE.search("\n".join(lines))
            if found is not None:
                return float(found[1])
        raise RivalFailedError(f"llama-perplexity printed no mean KLD: {lines[-1] if lines else 'nothing'}")

    def _perplexity(self, model: Path, text: Path, windows: int, *more: str) -> list[str]:
        read = ["--model", str(model), "--file", str(text), "--chunks", str(windows)]
        return self._call("llama-perplexity", *read, *self._context(), *more)

    def _context(self) -> list[str]:
        return ["--ctx-size", self._length, "--batch-size", self._length, *_ONE_THREAD]

    def _call(self, name: str, *arguments: str) -> list[str]:
        return self._run([str(self._folder / name), *arguments])
