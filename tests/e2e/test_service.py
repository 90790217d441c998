"""The service as a whole: real processes, a real database, and a model that is actually compressed."""

import hashlib
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.kill_matrix import uninterrupted
from tests.e2e.service_process import ROCKET
from tests.e2e.watching import LAYERS, REQUEST, assert_whole, events_of, has_told
from tests.sampling import sweep


def assert_small(service):
    """Check that the work is done in other processes: the service's own has no torch and takes little memory."""
    status = Path(f"/proc/{service.process.pid}/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    assert peak < 150 * 1024
    assert "libtorch" not in Path(f"/proc/{service.process.pid}/maps").read_text()


def test_a_submitted_job_gives_a_model_that_loads_elsewhere(finished_job, tmp_path, expected):
    service, job_id = finished_job
    job = service.job(job_id)
    assert (job["status"], job["progress"], job["attempt"], job["error"]) == ("succeeded", 1.0, 1, None)
    assert_small(service)
    assert_whole(service, job_id, expected)
    artifacts = service.client.get(f"/jobs/{job_id}/artifacts").json()["data"]
    for artifact in artifacts:
        file = tmp_path / "download" / artifact["name"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(service.client.get(f"/jobs/{job_id}/artifacts/{artifact['name']}").raise_for_status().content)
        assert hashlib.sha256(file.read_bytes()).hexdigest() == artifact["sha256"]
    sizes = [file.stat().st_size for file in (tmp_path / "download").glob("*/model.safetensors")]
    assert job["result"]["stored_bytes"] == min(sizes)
    assert job["result"]["achieved_ratio"] == pytest.approx(0.3, abs=0.005)
    code = (
        "import sys, rocket_core.hf, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "texts = []\n"
        "for kind in ('rocket', 'dense'):\n"
        "    model = AutoModelForCausalLM.from_pretrained(f'{sys.argv[1]}/{kind}')\n"
        "    tokenizer = AutoTokenizer.from_pretrained(f'{sys.argv[1]}/{kind}')\n"
        "    tokens = tokenizer('The function returns', return_tensors='pt')\n"
        "    texts.append(model(**tokens).logits.argmax(-1).tolist())\n"
        "assert texts[0] == texts[1], texts\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "download")], check=True, cwd=tmp_path)


def test_jobs_can_be_cancelled_and_retried(finished_job, small_model, tmp_path):
    service, _ = finished_job
    # Other text, so that the profile of the finished job cannot be reused.
    request = REQUEST | {"calibration": REQUEST["calibration"] | {"samples": 6}}
    running, waiting = service.submit(**request), service.submit(**request)
    answer = service.client.post(f"/jobs/{waiting}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    service.wait(running, until=lambda job: has_told(service, running, 10))
    answer = service.client.post(f"/jobs/{running}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (202, "cancelling")
    assert service.finished(running)["status"] == "cancelled"
    assert service.client.get(f"/jobs/{running}/artifacts").json()["data"] == []
    answer = service.client.post(f"/jobs/{running}/retry")
    assert answer.status_code == 202
    retried = answer.json()["id"]
    job = service.finished(retried)
    assert (job["status"], job["retry_of"]) == ("succeeded", running)
    assert service.hashes(retried) == uninterrupted(small_model, tmp_path / "out", request)
    assert service.job(running)["status"] == "cancelled"
    layers = service.client.get(f"/jobs/{retried}/layers").json()["data"]
    assert len(layers) == LAYERS
    # The second job did not repeat the work of the first.
    assert len([event for event in events_of(service, retried) if event["type"] == "layer"]) < LAYERS


@pytest.mark.soak  # `test_outages` kills the broker of a running service.
def test_an_unavailable_broker_loses_no_job(start_service, expected):
    service = start_service(ROCKET_BROKER_URL="redis://127.0.0.1:1/0")
    job_id = service.submit(**REQUEST)
    assert service.finished(job_id)["status"] == "succeeded"
    assert service.hashes(job_id) == expected
    assert service.client.get("/readyz").status_code == 200


def test_an_error_found_in_preflight_ends_the_job_with_its_code(finished_job):
    service, _ = finished_job
    folder = service.data_dir / "models" / "broken"
    shutil.copytree(service.data_dir / "models" / "tiny-llama", folder)
    (folder / "tokenizer.json").write_text("{}")
    job = service.finished(service.submit(**REQUEST | {"model_id": "local/broken"}))
    assert (job["status"], job["attempt"], job["result"]) == ("failed", 1, None)
    assert job["error"]["code"] == "checkpoint_format"
    assert job["error"]["stage"] == "preflight"
    assert not job["error"]["retryable"]
    assert str(service.data_dir) not in str(job)


def test_two_services_do_not_share_a_data_folder(finished_job):
    service, _ = finished_job
    command = [ROCKET, "serve", "--port", "0", "--data-dir", service.data_dir]
    second = subprocess.run(command, check=False, capture_output=True, text=True, timeout=180)
    assert second.returncode == 2
    assert "another service uses" in second.stderr
    assert "Traceback" not in second.stderr
    assert service.client.get("/healthz").status_code == 200


def test_api_processes_share_a_data_folder_but_not_with_serve(finished_job, tmp_path):
    service, _ = finished_job
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "ROCKET_DATA_DIR": str(service.data_dir)}
    options = {"capture_output": True, "text": True, "timeout": 60}
    command = [ROCKET, "api", "--port", "0"]
    refused = subprocess.run(command, check=False, env=environment, **options)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "another service uses" in refused.stderr
    assert service.client.get("/healthz").status_code == 200
    environment["ROCKET_DATA_DIR"] = str(tmp_path / "data")
    assert subprocess.run([ROCKET, "migrate"], check=False, env=environment, **options).returncode == 0
    with ExitStack() as stack:
        for _ in range(2):
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment))
            stack.callback(process.kill)
            assert process.stdout.readline().startswith(b"Serving on http://")
        refused = subprocess.run([ROCKET, "serve", "--port", "0"], check=False, env=environment, **options)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "another service uses" in refused.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    sweep(
        [(["--host", "192.0.2.1"], "no API key")],
        soak=[(["--host", "example.org"], "no API key"), (["--port", "x"], "port")],
    ),
)
def test_an_invalid_serve_command_fails_at_once(tmp_path, options, message):
    command = [ROCKET, "serve", "--data-dir", tmp_path / "data", *options]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=180)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_job_at_another_ratio_reuses_the_profile(finished_job):
    service, first = finished_job
    stored = set((service.data_dir / "profiles").iterdir())
    second = service.submit(**REQUEST | {"ratio": 0.45})
    assert service.finished(second)["status"] == "succeeded"
    jobs = [service.job(job_id) for job_id in (first, second)]
    assert jobs[0]["profile_id"] == jobs[1]["profile_id"]
    assert jobs[1]["result"]["kept_parameters"] < jobs[0]["result"]["kept_parameters"]
    layers = [service.client.get(f"/jobs/{job_id}/layers").json()["data"] for job_id in (first, second)]
    profiles = [[{**layer, "chosen": None} for layer in found] for found in layers]
    assert profiles[0] == profiles[1]
    assert set((service.data_dir / "profiles").iterdir()) == stored != set()
    # The result matches the earlier prediction.
    asked = {"ratio": 0.45}
    predicted = service.client.post(f"/profiles/{jobs[0]['profile_id']}/allocations", json=asked).json()
    assert [layer["chosen"] for layer in predicted["layers"]] == [layer["chosen"] for layer in layers[1]]


def test_the_default_length_given_or_not_is_calibrated_once(finished_job):
    service, _ = finished_job
    # The model has 256 positions, fewer than the usual length.
    texts = ({"samples": 4}, {"samples": 4, "sequence_length": 256})
    stored, profiles = [], []
    for text in texts:
        job = service.finished(service.submit(**REQUEST | {"calibration": text}))
        assert (job["status"], job["calibration"]["samples"]) == ("succeeded", 4)
        profiles.append(job["profile_id"])
        stored.append(set((service.data_dir / "profiles").iterdir()))
    assert profiles[0] == profiles[1]
    assert stored[0] == stored[1]
