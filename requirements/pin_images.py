"""Pinning of third-party images by digest in `.env`: `make pin-images`."""

import argparse
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

_REFERENCE = re.compile(r"\$\{([A-Z]+_IMAGE):-([^}]+)\}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SECONDS = 120


def main(arguments: Sequence[str] | None = None) -> None:
    """Look up the digest of each image and write the pinned references.

    Args:
        arguments: command line arguments; None takes those of this process.
    """
    parser = argparse.ArgumentParser(description="Pins the images of docker-compose.yml by digest.")
    parser.add_argument("--env-file", type=Path, default=ROOT / ".env", help="file to write into; default .env")
    parser.add_argument("--print", action="store_true", help="print the lines and write nothing")
    options = parser.parse_args(arguments)
    docker = shutil.which("docker")
    if docker is None:
        raise SystemExit("pin-images needs docker with buildx; install it, or write the digests into .env by hand")
    # Look up every digest before anything is written.
    pinned = {name: f"{image}@{_digest(docker, image)}" for name, image in default_images().items()}
    if options.print:
        print("\n".join(f"{name}={image}" for name, image in pinned.items()))  # noqa: T201 - what was asked for
        return
    write(options.env_file, pinned)


def default_images() -> dict[str, str]:
    """Return the default images of docker-compose.yml, by the variable that overrides each."""
    return dict(_REFERENCE.findall((ROOT / "docker-compose.yml").read_text(encoding="utf-8")))


def write(file: Path, variables: dict[str, str]) -> None:
    """Set variables in an environment file, and keep its other lines.

    Args:
        file: the file; created if it does not exist.
        variables: values by name.
    """
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    kept = [line for line in lines if line.partition("=")[0].strip() not in variables]
    text = "\n".join([*kept, *(f"{name}={value}" for name, value in variables.items())]) + "\n"
    # Only the owner may read a new file, as it will contain passwords.
    file.touch(mode=0o600)
    file.write_text(text, encoding="utf-8")


def _digest(docker: str, image: str) -> str:
    """Return the digest of a multi-platform image in its registry."""
    command = [docker, "buildx", "imagetools", "inspect", image, "--format", "{{json .Manifest.Digest}}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"docker finds no digest of {image}; nothing is pinned. It says:\n{error.stderr}") from error
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"docker finds no digest of {image} in {_SECONDS} s; nothing is pinned") from error
    try:
        digest = json.loads(result.stdout)
    except ValueError:
        digest = None
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise SystemExit(f"docker answers with no digest for {image}; update docker buildx. Nothing is pinned")
    return digest


if __name__ == "__main__":
    main()
