import json
import stat

import pytest

from requirements import pin_images

DIGEST = "sha256:" + "ab" * 32


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """Create a program in place of docker, as no registry is available here; it records its calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    file = folder / "docker"

    def answer(line, status=0):
        file.write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/asked\necho '{line}'\nexit {status}\n", encoding="utf-8")
        file.chmod(0o755)
        return tmp_path / "asked"

    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return answer


def test_the_images_are_those_of_compose_file_and_dockerfile():
    images = pin_images.default_images()
    assert set(images) == {"PYTHON_IMAGE", "POSTGRES_IMAGE", "REDIS_IMAGE"}
    assert all(":" in image and "@" not in image for image in images.values())
    dockerfile = (pin_images.ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert f"ARG PYTHON_IMAGE={images['PYTHON_IMAGE']}\n" in dockerfile


def test_digests_are_written_and_other_lines_are_kept(docker, tmp_path):
    asked = docker(json.dumps(DIGEST))
    file = tmp_path / ".env"
    file.write_text(
        "POSTGRES_PASSWORD=a=b\n#REDIS_IMAGE=x\nREDIS_IMAGE=redis:6@sha256:0\n\nHF_TOKEN=c\n", encoding="utf-8"
    )
    pin_images.main(["--env-file", str(file)])
    pinned = [f"{name}={image}@{DIGEST}" for name, image in pin_images.default_images().items()]
    assert file.read_text(encoding="utf-8").splitlines() == [
        "POSTGRES_PASSWORD=a=b", "#REDIS_IMAGE=x", "", "HF_TOKEN=c", *pinned
    ]  # fmt: skip
    assert asked.read_text(encoding="utf-8").count("buildx imagetools inspect") == len(pinned)
    pin_images.main(["--env-file", str(file)])
    assert len(file.read_text(encoding="utf-8").splitlines()) == 4 + len(pinned)


def test_a_new_file_is_private_to_its_owner(docker, tmp_path):
    docker(json.dumps(DIGEST))
    pin_images.main(["--env-file", str(tmp_path / "new")])
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600


def test_digests_can_be_printed_instead(docker, tmp_path, capsys):
    docker(json.dumps(DIGEST))
    pin_images.main(["--print", "--env-file", str(tmp_path / "new")])
    assert f"PYTHON_IMAGE=python:3.12-slim@{DIGEST}" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("line", "status", "says"),
    [("", 1, "finds no digest of"), ("Name: python", 0, "answers with no digest"), ('"sha256:12"', 0, "no digest")],
)
def test_without_a_digest_nothing_is_written(docker, tmp_path, line, status, says):
    docker(line, status)
    with pytest.raises(SystemExit, match=f"{says}.*[Nn]othing is pinned"):
        pin_images.main(["--env-file", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()


def test_missing_docker_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="needs docker with buildx"):
        pin_images.main([])
