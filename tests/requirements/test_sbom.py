import json
import os
import shutil
import subprocess
import sys

import pytest
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation import make_schemabased_validator

from requirements.lock import ROOT
from tests.requirements.test_lock import locked, text_of

# Python runs this at the start of every process: one that uses the network fails.
OFFLINE = """
import socket


def refuse(*_):
    raise SystemExit("no network is needed for this")


socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
"""
SBOM = ROOT / "requirements" / "sbom.py"


@pytest.fixture(scope="module")
def bills(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sbom")
    (folder / "sitecustomize.py").write_text(OFFLINE, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(folder)}
    probe = [sys.executable, "-c", "import socket; socket.create_connection(('127.0.0.1', 9))"]
    assert b"no network is needed" in subprocess.run(probe, env=environment, capture_output=True, check=False).stderr
    subprocess.run([sys.executable, str(SBOM), "--output", str(folder)], check=True, env=environment)
    return {image: (folder / f"sbom-{image}.cdx.json").read_text(encoding="utf-8") for image in ("api", "worker")}


@pytest.mark.parametrize("image", ["api", "worker"])
def test_the_sbom_is_valid_cyclonedx(bills, image):
    version = SchemaVersion.from_version(json.loads(bills[image])["specVersion"])
    assert make_schemabased_validator(OutputFormat.JSON, version).validate_str(bills[image]) is None


@pytest.mark.parametrize(("image", "locks"), [("api", ["api"]), ("worker", ["worker", "torch"])])
def test_the_sbom_lists_every_locked_package_with_hashes(bills, image, locks):
    bill = json.loads(bills[image])
    assert (bill["metadata"]["component"]["name"], bill["bomFormat"]) == ("rocket-compress", "CycloneDX")
    listed = {part["name"]: part for part in bill["components"]}
    packages = {name: requirement for lock in locks for name, requirement in locked(text_of(lock)).items()}
    assert {name: f"=={part['version']}" for name, part in listed.items()} == {
        name: str(requirement.specifier) for name, requirement in packages.items()
    }
    hashes = {
        entry["content"]
        for part in listed.values()
        for reference in part["externalReferences"]
        for entry in reference.get("hashes", ())
    }
    assert hashes == {
        line.split("sha256:")[1][:64] for lock in locks for line in text_of(lock).splitlines() if "sha256:" in line
    }
    assert all(part["purl"] == f"pkg:pypi/{name}@{part['version']}" for name, part in listed.items())


def test_the_sbom_is_reproducible(bills, tmp_path):
    subprocess.run([sys.executable, str(SBOM), "--image", "api", "--output", str(tmp_path)], check=True)
    assert {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()} == {
        "sbom-api.cdx.json": bills["api"]
    }


def test_a_damaged_lock_gives_no_sbom(tmp_path):
    copy = tmp_path / "requirements"
    shutil.copytree(ROOT / "requirements", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "api.txt").unlink()
    result = subprocess.run([sys.executable, str(copy / "sbom.py")], check=False, capture_output=True, text=True)
    assert result.returncode != 0
    assert not (tmp_path / "build" / "sbom-api.cdx.json").exists()
