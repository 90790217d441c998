"""The walk-through of the README, run unchanged."""

import re
import subprocess
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.mark.system
def test_the_curl_walkthrough_works_as_typed(start_service, tmp_path):
    [walk] = re.findall(r"```sh\n(SERVER=.*?)```", README, flags=re.DOTALL)
    service = start_service()
    script = walk.replace("http://127.0.0.1:8000", service.url)
    folder = tmp_path / "terminal"
    folder.mkdir()
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], check=False, capture_output=True, text=True, cwd=folder, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert '"local/tiny-llama"' in result.stdout
    assert "event: done" in result.stdout
    assert '"status":"succeeded"' in result.stdout
    [job] = service.client.get("/jobs").raise_for_status().json()["data"]
    expected = {file["name"]: file["size"] for file in service.client.get(job["links"]["artifacts"]).json()["data"]}
    found = {
        file.relative_to(folder / "smaller").as_posix(): file.stat().st_size
        for file in (folder / "smaller").rglob("*")
        if file.is_file()
    }
    assert found == expected
    assert (folder / "report.json").read_bytes()
