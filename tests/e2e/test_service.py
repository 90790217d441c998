"""The service as a whole: real processes, a real database, and a model that is really compressed."""

import hashlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.service_process import ROCKET, Service

REQUEST = {
    "model_id": "local/tiny-llama",
    "ratio": 0.3,
    "calibration": {"samples": 8, "sequence_length": 128},
}
TERMINAL = {"succeeded", "failed", "cancelled"}


def events_of(service, job_id):
    found = []
    while (
        page := service.client.get(f"/jobs/{job_id}/events", params={"after": len(found), "limit": 100})
        .raise_for_status()
        .json()["data"]
    ):
        found += page
    return found


@pytest.fixture(scope="module")
def finished_job(tmp_path_factory):
    """A service, still running, and a job of its that nothing happened to."""
    data_dir = tmp_path_factory.mktemp("uninterrupted") / "data"
    (data_dir / "models").mkdir(parents=True)
    (data_dir / "models" / "tiny-llama").symlink_to(MODEL)
    service = Service(data_dir)
    try:
        job_id = service.submit(**REQUEST)
        assert service.finished(job_id)["status"] == "succeeded"
        yield service, job_id
    finally:
        service.close()


@pytest.fixture(scope="module")
def uninterrupted(finished_job):
    """Hashes of the artifacts, and events, of that job."""
    service, job_id = finished_job
    return service.hashes(job_id), events_of(service, job_id)


def assert_whole(service, job_id, hashes):
    """What must hold of a job that has succeeded, whatever happened to it."""
    assert service.hashes(job_id) == hashes
    events = events_of(service, job_id)
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    profiled = [event["data"]["layer"] for event in events if event["type"] == "layer"]
    assert len(profiled) == len(set(profiled)) == 42
    assert [event["type"] for event in events].count("allocation") == 1
    layers = service.client.get(f"/jobs/{job_id}/layers").json()["data"]
    report = service.client.get(f"/jobs/{job_id}/report").json()
    assert [layer["name"] for layer in layers] == [layer["name"] for layer in report["layers"]]
    leaders = {layer["name"]: layer for layer in layers if layer["shared"]}
    for layer, told in zip(layers, report["layers"], strict=True):
        shared = leaders.get(layer["input_group"], {"shared": []})["shared"]
        offered = layer["candidates"] + [member for together in shared for member in together["members"]]
        assert any(is_made_from(layer["chosen"], candidate) for candidate in offered)
        assert (layer["chosen"]["rank"], layer["chosen"]["nnz"]) == (told["rank"], told["nnz"])
    stored = {path.name for path in (service.data_dir / "artifacts").iterdir()}
    assert len(stored) == len(service.client.get(f"/jobs/{job_id}/artifacts").json()["data"])
    assert list((service.data_dir / "work").iterdir()) == []


def is_made_from(chosen, candidate):
    """Whether they are the same, but for the nonzeros that what was left of the budget was spent on."""
    grown = {"nnz", "kept_parameters", "stored_bytes"}
    return all(value == candidate[name] for name, value in chosen.items() if name not in grown) and all(
        candidate[name] is None or chosen[name] >= candidate[name] for name in grown
    )


def assert_small(service):
    """The work is done elsewhere: no torch in the service's own process, and little memory."""
    status = Path(f"/proc/{service.process.pid}/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    assert peak < 150 * 1024
    assert "libtorch" not in Path(f"/proc/{service.process.pid}/maps").read_text()


def test_from_submit_to_a_model_loaded_in_a_new_process(finished_job, tmp_path, uninterrupted):
    service, job_id = finished_job
    job = service.job(job_id)
    assert (job["status"], job["progress"], job["attempt"], job["error"]) == ("succeeded", 1.0, 1, None)
    assert_small(service)
    assert_whole(service, job_id, uninterrupted[0])
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
        "for kind in ('factored', 'dense'):\n"
        "    model = AutoModelForCausalLM.from_pretrained(f'{sys.argv[1]}/{kind}')\n"
        "    tokenizer = AutoTokenizer.from_pretrained(f'{sys.argv[1]}/{kind}')\n"
        "    tokens = tokenizer('The function returns', return_tensors='pt')\n"
        "    texts.append(model(**tokens).logits.argmax(-1).tolist())\n"
        "assert texts[0] == texts[1], texts\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "download")], check=True, cwd=tmp_path)


@pytest.mark.databases("sqlite", "postgres")
def test_killed_at_random_moments_it_ends_with_the_same_bytes(start_service, uninterrupted):
    hashes, events = uninterrupted
    seed = random.SystemRandom().randrange(10**6)
    moments = random.Random(seed)
    # Named by what the job has told by then; the last events leave no time to strike before the end.
    strikes = sorted(moments.randrange(2, len(events) - 2) for _ in range(2))
    service = start_service()
    job_id = service.submit(**REQUEST)
    for strike, target in zip(strikes, moments.sample(["job", "service"], k=2), strict=True):
        service.wait(job_id, until=lambda job, strike=strike: has_told(service, job_id, strike) or is_over(job))
        time.sleep(moments.uniform(0, 0.2))
        if target == "service":
            service.kill()
            service.start()
        else:
            service.kill_job()
    job = service.finished(job_id)
    assert job["status"] == "succeeded", (seed, strikes, job, service.log.read_text()[-3000:])
    assert 1 <= job["attempt"] <= 3
    assert_whole(service, job_id, hashes)


def has_told(service, job_id, count):
    return service.client.get(f"/jobs/{job_id}/events", params={"after": count - 1, "limit": 1}).json()["data"]


def is_over(job):
    return job["status"] in TERMINAL


@pytest.mark.databases("sqlite", "postgres")
def test_told_to_stop_it_lets_its_job_go_and_goes_on_at_the_next_start(start_service, uninterrupted):
    service = start_service()
    job_id = service.submit(**REQUEST)
    service.wait(job_id, until=lambda job: has_told(service, job_id, 10))
    began = time.monotonic()
    assert service.stop() == 0
    assert time.monotonic() - began < 30
    service.start()
    job = service.finished(job_id)
    # An orderly stop is nobody's fault and costs no attempt.
    assert (job["status"], job["attempt"]) == ("succeeded", 1)
    assert_whole(service, job_id, uninterrupted[0])
    assert service.stop(signal.SIGINT) == 0


def test_cancelled_waiting_and_running_and_retried(start_service, uninterrupted):
    service = start_service()
    running, waiting = service.submit(**REQUEST), service.submit(**REQUEST)
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
    assert service.hashes(retried) == uninterrupted[0]
    assert service.job(running)["status"] == "cancelled"
    layers = service.client.get(f"/jobs/{retried}/layers").json()["data"]
    assert len(layers) == 42
    # What the first had done was not done again.
    assert len([event for event in events_of(service, retried) if event["type"] == "layer"]) < 42


def test_a_broker_that_is_down_costs_no_job(start_service, uninterrupted):
    service = start_service(ROCKET_BROKER_URL="redis://127.0.0.1:1/0")
    job_id = service.submit(**REQUEST)
    assert service.finished(job_id)["status"] == "succeeded"
    assert service.hashes(job_id) == uninterrupted[0]
    assert service.client.get("/readyz").status_code == 200


def test_what_is_found_in_preflight_ends_the_job_under_its_code(start_service):
    service = start_service()
    job = service.finished(service.submit(**REQUEST, options={"ignore": ["*.no_such_layer"]}))
    assert (job["status"], job["attempt"], job["result"]) == ("failed", 1, None)
    assert job["error"]["code"] == "unmatched_ignore"
    assert job["error"]["stage"] == "preflight"
    assert not job["error"]["retryable"]
    assert str(service.data_dir) not in str(job)


def test_two_services_do_not_share_a_data_folder(start_service):
    service = start_service()
    command = [ROCKET, "serve", "--port", "0", "--data-dir", service.data_dir]
    second = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert second.returncode == 2
    assert "another service uses" in second.stderr
    assert "Traceback" not in second.stderr
    assert service.client.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "192.0.2.1"], "no API key"),
        (["--host", "example.org"], "no API key"),
        (["--port", "x"], "port"),
    ],
)
def test_what_cannot_be_served_is_said_at_once(tmp_path, options, message):
    command = [ROCKET, "serve", "--data-dir", tmp_path / "data", *options]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_another_ratio_takes_over_what_the_first_job_has_found_out(finished_job):
    service, first = finished_job
    second = service.submit(**REQUEST | {"ratio": 0.45})
    assert service.finished(second)["status"] == "succeeded"
    jobs = [service.job(job_id) for job_id in (first, second)]
    assert jobs[0]["profile_id"] == jobs[1]["profile_id"]
    assert jobs[1]["result"]["kept_parameters"] < jobs[0]["result"]["kept_parameters"]
    layers = [service.client.get(f"/jobs/{job_id}/layers").json()["data"] for job_id in (first, second)]
    profiles = [[{**layer, "chosen": None} for layer in found] for found in layers]
    assert profiles[0] == profiles[1]
    assert len(list((service.data_dir / "profiles").iterdir())) == 1
    # What was predicted before is what came out.
    asked = {"ratio": 0.45}
    predicted = service.client.post(f"/profiles/{jobs[0]['profile_id']}/allocations", json=asked).json()
    assert [layer["chosen"] for layer in predicted["layers"]] == [layer["chosen"] for layer in layers[1]]
