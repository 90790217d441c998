"""Locked requirements of the images, with hashes: `make lock`."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
EXTRAS = {"api": ("s3",), "worker": ("worker", "s3", "vision", "evaluation")}
"""Extras of the project that each image has."""
TARGETS = tuple(
    {
        "python_version": python.rpartition(".")[0],
        "python_full_version": python,
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }
    for python in ("3.11.7", "3.12.0", "3.13.0")
    for machine in ("x86_64", "aarch64")
)
"""Environments that the files are for, as markers see them."""

_TORCH = "torch"
# Required by torch alone, and only by its builds for GPUs. A build from another index may need none of it.
_GPU_PACKAGE = re.compile(r"(cuda|nvidia)-|triton$")
_HEADER = """\
# Written by requirements/lock.py (`make lock`): do not edit.
# For CPython 3.11 to 3.13 on Linux, x86_64 and aarch64.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the locked requirements.

    Args:
        arguments: of the command line; None takes those of this process.
    """
    parser = argparse.ArgumentParser(description="Locks what the images install.")
    parser.add_argument("--torch-index", help="URL of an index of torch builds: locks torch from there, nothing else")
    parser.add_argument("--output", type=Path, help="file for that, such as requirements/torch-cpu.txt")
    options = parser.parse_args(arguments)
    if (options.torch_index is None) != (options.output is None):
        parser.error("give --torch-index and --output together, or neither")
    if options.torch_index is not None:
        index = ("--index", options.torch_index, "--index-strategy", "unsafe-best-match")
        lock(options.output, [_TORCH], only_torch=True, index=index)
        return
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lock(FOLDER / "build.txt", project["build-system"]["requires"])
    for image, extras in EXTRAS.items():
        lock(FOLDER / f"{image}.txt", requirements_of(project["project"], extras))
    lock(FOLDER / "torch.txt", [_TORCH], only_torch=True)


def requirements_of(metadata: Mapping[str, object], extras: Iterable[str]) -> list[str]:
    """Return what the project requires with these extras, without itself."""
    optional = metadata["optional-dependencies"]
    wanted = [*metadata["dependencies"], *(text for extra in extras for text in optional[extra])]
    # An extra that includes another one names the project, which is built from source.
    return [text for text in wanted if Requirement(text).name != metadata["name"]]


def lock(file: Path, wanted: Iterable[str], *, only_torch: bool = False, index: Sequence[str] = ()) -> None:
    """Write the packages that requirements bring, each with its version and hashes.

    Versions come from constraints.txt. Those that are not there (what torch's builds for GPUs need) stay as the file
    has them already, where torch allows it.

    Args:
        file: the file to write.
        wanted: the requirements.
        only_torch: keep torch and the packages for GPUs; otherwise, keep everything else.
        index: options of uv that name further indexes.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / file.name
        if file.exists():
            shutil.copy(file, output)
        command = [sys.executable, "-m", "uv", "--no-config", "pip", "compile", "-", "--quiet", "--universal"]
        command += ["--constraints", "constraints.txt", "--python-version", TARGETS[0]["python_full_version"]]
        command += ["--generate-hashes", "--no-header", "--no-annotate", "--output-file", str(output), *index]
        # The result must not depend on the environment of the caller.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
        result = subprocess.run(
            command, cwd=ROOT, env=environment, input="\n".join(wanted), text=True, capture_output=True, check=False
        )
        if result.returncode != 0:
            raise SystemExit(f"{file.name} is not locked; uv says:\n{result.stderr}")
        text = output.read_text(encoding="utf-8")
    packages = [package for package in _packages(text) if _is_torch(package) == only_torch]
    file.write_text(_HEADER + "".join(packages), encoding="utf-8")


def _packages(text: str) -> Iterable[str]:
    """Yield the lines of each package that any of the targets needs, with the marker only where it matters."""
    for block in re.findall(r"^\S.*\\\n(?:    --hash=.*\n)+", text, flags=re.MULTILINE):
        first, _, hashes = block.partition(" \\\n")
        requirement = Requirement(first)
        needed = [requirement.marker is None or requirement.marker.evaluate(target) for target in TARGETS]
        if all(needed):
            yield f"{requirement.name}{requirement.specifier} \\\n{hashes}"
        elif any(needed):
            yield block


def _is_torch(package: str) -> bool:
    name = canonicalize_name(re.match(r"[\w.-]+", package)[0])
    return name == _TORCH or _GPU_PACKAGE.match(name) is not None


if __name__ == "__main__":
    main()
