"""Software bills of materials of the images, in CycloneDX, from the locked requirements: `make sbom`."""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the bill of materials of each image and validate it against the schema.

    Args:
        arguments: command line arguments; None takes those of this process.
    """
    parser = argparse.ArgumentParser(description="Lists what the images install, in CycloneDX.")
    parser.add_argument("--image", choices=("api", "worker"), help="only this one; default both")
    parser.add_argument("--output", type=Path, default=ROOT / "build", help="folder to write into; default build")
    parser.add_argument(
        "--torch-lock", default="torch.txt", help="file in requirements/ that the worker's torch is from"
    )
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    for image, locks in {"api": ("api.txt",), "worker": ("worker.txt", options.torch_lock)}.items():
        if options.image not in {None, image}:
            continue
        locked = "".join((FOLDER / lock).read_text(encoding="utf-8") for lock in locks)
        file = options.output / f"sbom-{image}.cdx.json"
        command = [sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements", "-", "--output-reproducible"]
        command += ["--pyproject", str(ROOT / "pyproject.toml"), "--validate", "--output-file", str(file)]
        subprocess.run(command, input=locked, text=True, check=True)


if __name__ == "__main__":
    main()
