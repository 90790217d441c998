"""Lock files of the images' requirements, with hashes: `make lock`."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
EXTRAS = {"api": ("service", "s3"), "worker": ("worker", "s3", "vision", "evaluation")}
"""Extras of the project in each image."""
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
"""Environments that the files are for, as values of markers."""

_TORCH = "torch"
_HEADER = """\
# Written by requirements/lock.py (`make lock`): do not edit.
# For CPython 3.11 to 3.13 on Linux, x86_64 and aarch64.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the locked requirements.

    Args:
        arguments: command line arguments; None takes those of this process.
    """
    parser = argparse.ArgumentParser(description="Locks what the images install.")
    parser.add_argument("--torch-index", help="URL of an index of torch builds: locks torch from there, nothing else")
    parser.add_argument("--output", type=Path, help="file for that, such as requirements/torch-cpu.txt")
    options = parser.parse_args(arguments)
    if (options.torch_index is None) != (options.output is None):
        parser.error("give --torch-index and --output together, or neither")
    pinned = _pinned()
    if options.torch_index is not None:
        index = ("--index", options.torch_index, "--index-strategy", "unsafe-best-match")
        lock(options.output, [_TORCH], without=pinned - {_TORCH}, index=index)
        return
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    # Torch and the packages that only its GPU builds require, which builds from another index may not need.
    torch = lock(FOLDER / "torch.txt", [_TORCH], without=pinned - {_TORCH})
    lock(FOLDER / "build.txt", project["build-system"]["requires"])
    for image, extras in EXTRAS.items():
        lock(FOLDER / f"{image}.txt", requirements_of(project["project"], extras), without=torch)


def requirements_of(metadata: Mapping[str, Any], extras: Iterable[str]) -> list[str]:
    """Return the project's requirements with these extras, without the project itself."""
    wanted: dict[str, None] = dict.fromkeys(metadata["dependencies"])
    for extra in extras:
        for text in metadata["optional-dependencies"][extra]:
            requirement = Requirement(text)
            if requirement.name == metadata["name"]:
                # An extra that includes others names the project itself, which is built from source.
                wanted |= dict.fromkeys(requirements_of(metadata, sorted(requirement.extras)))
            else:
                wanted[text] = None
    return list(wanted)


def lock(
    file: Path, wanted: Iterable[str], *, without: Set[str] = frozenset(), index: Sequence[str] = ()
) -> frozenset[str]:
    """Write the packages that requirements resolve to, with versions and hashes.

    Versions come from constraints.txt. Packages that are not in it (those of torch's GPU builds) keep their version
    in the existing file, where torch allows it.

    Args:
        file: the file to write.
        wanted: the requirements.
        without: packages that are in another file.
        index: options of uv that add indexes.

    Returns:
        The names of the packages in the file.
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
    packages = {name: lines for name, lines in _packages(text) if name not in without}
    file.write_text(_HEADER + "".join(packages.values()), encoding="utf-8")
    return frozenset(packages)


def _pinned() -> frozenset[str]:
    """Return the packages whose versions are in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(canonicalize_name(Requirement(line).name) for line in lines)


def _packages(text: str) -> Iterator[tuple[str, str]]:
    """Yield each package that a target needs with its lines, and with a marker only if some targets do not need it."""
    for block in re.findall(r"^\S.*\\\n(?:    --hash=.*\n)+", text, flags=re.MULTILINE):
        first, _, hashes = block.partition(" \\\n")
        requirement = Requirement(first)
        marker = requirement.marker
        needed = [marker is None or marker.evaluate(target) for target in TARGETS]
        if any(needed):
            plain = f"{requirement.name}{requirement.specifier} \\\n{hashes}"
            yield canonicalize_name(requirement.name), plain if all(needed) else block


if __name__ == "__main__":
    main()
