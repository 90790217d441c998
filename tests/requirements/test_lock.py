import hashlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from requirements.lock import EXTRAS, FOLDER, ROOT, TARGETS, lock, requirements_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
FILES = ("build", "api", "worker", "torch")
HEAVY = {"torch", "transformers", "safetensors", "accelerate", "datasets", "tokenizers"}


def text_of(name):
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def locked(text):
    """Return the packages of a file, each with its one requirement."""
    found = [Requirement(line.rstrip(" \\")) for line in text.splitlines() if re.match(r"[A-Za-z0-9]", line)]
    packages = {canonicalize_name(requirement.name): requirement for requirement in found}
    assert len(packages) == len(found)
    return packages


PINS = {name: str(requirement.specifier) for name, requirement in locked(CONSTRAINTS).items()}


def closure(requirements):
    """Return the packages that requirements pull in, according to what is installed."""
    found, waiting, seen = set(), [(Requirement(text), frozenset()) for text in requirements], set()
    while waiting:
        requirement, extras = waiting.pop()
        if requirement.marker and not any(requirement.marker.evaluate({"extra": e}) for e in extras or {""}):
            continue
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        found.add(name)
        for text in importlib.metadata.requires(name) or ():
            waiting.append((Requirement(text), frozenset({"", *requirement.extras})))
    return found


@pytest.mark.parametrize("name", FILES)
def test_every_package_is_locked_once_with_hashes(name):
    text = text_of(name)
    blocks = re.findall(r"^(\S+==\S+(?: ; .*)?) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, flags=re.M)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) == sum(1 + hashes.count("\n") for _, hashes in blocks)
    # No index, no address and no path of the machine that locked.
    assert not re.search(r"://|--(?!hash=)|/(?!lock\.py)", "".join(lines))
    assert len(locked(text)) == len(blocks)


@pytest.mark.parametrize("name", ["build", "api", "worker"])
def test_locked_versions_are_those_of_the_constraints(name):
    packages = locked(text_of(name))
    assert {package: str(requirement.specifier) for package, requirement in packages.items()} == {
        package: PINS.get(package) for package in packages
    }


def test_only_torch_and_gpu_packages_are_in_the_torch_lock():
    packages = locked(text_of("torch"))
    assert str(packages.pop("torch").specifier) == PINS["torch"]
    assert packages
    assert all(re.match(r"(cuda|nvidia)-|triton$", name) for name in packages)
    assert not set(packages) & set(PINS)
    assert not {*packages, "torch"} & set(locked(text_of("worker")))


@pytest.mark.parametrize("image", EXTRAS)
def test_the_locks_have_exactly_what_each_image_needs(image):
    wanted = requirements_of(PROJECT["project"], EXTRAS[image])
    names = set(locked(text_of(image)))
    if image == "worker":
        names |= {"torch"}
    # Torch from an index for GPUs requires more than it does from one for processors.
    assert names == closure(wanted) & set(PINS)


def test_the_api_lock_has_no_torch_and_the_worker_lock_has():
    assert not HEAVY & set(locked(text_of("api")))
    assert HEAVY - {"torch"} <= set(locked(text_of("worker")))


def test_all_locks_have_the_same_targets():
    assert {target["python_version"] for target in TARGETS} == {"3.11", "3.12", "3.13"}
    assert {target["platform_machine"] for target in TARGETS} == {"x86_64", "aarch64"}
    # A remaining marker distinguishes these targets.
    for requirement in (requirement for name in FILES for requirement in locked(text_of(name)).values()):
        needed = [requirement.marker is None or requirement.marker.evaluate(target) for target in TARGETS]
        assert requirement.marker is None or len(set(needed)) == 2


def test_pip_refuses_a_package_with_another_hash(tmp_path):
    """Install a locked package that is not a real one, once with its hash and once with another."""
    wheel = make_wheel(tmp_path)
    right = subprocess.run(
        [sys.executable, "-m", "pip", "hash", str(wheel)], capture_output=True, text=True, check=True
    ).stdout
    [digest] = re.findall(r"sha256:[0-9a-f]{64}", right)
    for value, works in ((digest, True), ("sha256:" + "0" * 64, False)):
        (tmp_path / "lock.txt").write_text(f"rocket-test-nothing==1.0 \\\n    --hash={value}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--isolated", "--dry-run", "--no-index", "--find-links"]
        command += [str(tmp_path), "--require-hashes", "--no-deps", "-r", str(tmp_path / "lock.txt")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (result.returncode == 0) is works, result.stderr
        assert ("DO NOT MATCH THE HASHES" in result.stderr) is not works


def test_locking_uses_pinned_versions_and_hashes_of_the_index(tmp_path, monkeypatch):
    """Lock without a network, from a folder instead of an index."""
    wheel = make_wheel(tmp_path)
    # Nothing from the caller's environment changes the result.
    monkeypatch.setenv("UV_NO_INDEX", "0")
    monkeypatch.setenv("UV_INDEX_URL", "http://127.0.0.1:9/simple")
    file = tmp_path / "out.txt"
    lock(file, ["rocket-test-nothing"], index=("--no-index", "--find-links", str(tmp_path)))
    text = file.read_text(encoding="utf-8")
    assert list(locked(text)) == ["rocket-test-nothing"]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert f"--hash=sha256:{digest}" in text
    assert str(tmp_path) not in text


def test_an_unsatisfiable_requirement_writes_nothing(tmp_path):
    file = tmp_path / "out.txt"
    with pytest.raises(SystemExit, match=r"out\.txt is not locked; uv says"):
        lock(file, ["rocket-test-nothing"], index=("--no-index", "--find-links", str(tmp_path)))
    assert not file.exists()


def make_wheel(folder):
    """Return a wheel without content."""
    file = folder / "rocket_test_nothing-1.0-py3-none-any.whl"
    metadata = {
        "METADATA": "Metadata-Version: 2.1\nName: rocket-test-nothing\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in metadata.items():
            archive.writestr(f"rocket_test_nothing-1.0.dist-info/{name}", content)
    return file
