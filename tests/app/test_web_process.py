"""The web side in a separate process, with every kind of request: it stays small and loads no compression libraries."""

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from app.services.context import open_context
from tests.app.api.conftest import BODY, Worker
from tests.reference.fake_hub import FakeHub
from tests.reference.safetensors_files import llama_tensors, safetensors_bytes

ROOT = Path(__file__).parents[2]
# It takes 149 to 151: 117 are imports, and the rest depends on which threads answer. torch alone would take 200 more.
RESIDENT_LIMIT_MIB = 165
HEAVY = {"torch", "transformers", "safetensors", "accelerate", "tokenizers", "datasets", "pandas", "pyarrow"}
SERVER = """
import json, socket, sys, uvicorn
from app.main import create_app
from app.shared.settings import load_settings
config = uvicorn.Config(create_app(load_settings()), log_level="warning")
try:
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
except KeyboardInterrupt:
    # Raised again by the server once it has stopped.
    print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


@pytest.fixture
def hub():
    with FakeHub() as hub:
        shard = llama_tensors(blocks=8)
        names = [f"model-{number}.safetensors" for number in range(32)]
        index = {"weight_map": {str(number): name for number, name in enumerate(names)}}
        hub.repositories["org/model"] = {
            "config.json": b'{"model_type": "llama"}',
            "model.safetensors.index.json": json.dumps(index).encode(),
            "tokenizer.json": b"{}",
            **dict.fromkeys(names, safetensors_bytes(shard)),
        }
        yield hub


@pytest.fixture
def server(settings, hub):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "ROCKET_"))}
        environment |= {"ROCKET_DATA_DIR": str(settings.data_dir), "HF_ENDPOINT": hub.url}
        with subprocess.Popen(
            [sys.executable, "-c", SERVER, str(listener.fileno())],
            cwd=ROOT,
            env=environment,
            pass_fds=[listener.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with httpx2.Client(base_url=url, timeout=180, trust_env=False) as client:
                yield process, client
            process.kill()


@pytest.fixture
def worker(settings, profile, factored, report, result):
    context = open_context(settings)
    yield Worker(context, profile, factored, report, result)
    context.database.close()


def memory(process):
    lines = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
    return {line.split()[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith(("VmRSS", "VmHWM"))}


def test_the_process_stays_small_and_loads_no_compression_code(server, worker):
    process, client = server
    submitted = client.post("/jobs", json=BODY)
    assert submitted.status_code == 202, submitted.text
    path = submitted.headers["Location"]
    worker.succeed(path.rsplit("/", 1)[-1], {"model.safetensors": bytes(2**24)})

    def submit(_):
        for _attempt in range(5):
            answer = client.post("/jobs", json=BODY | {"model_id": "org/model"})
            # On a busy machine the Hub is too slow for some, and clients try again.
            if answer.status_code != 503:
                break
        return answer

    with ThreadPoolExecutor(8) as pool:
        from_hub = list(pool.map(submit, range(24)))
    assert {answer.status_code for answer in from_hub} == {202}, {
        answer.text for answer in from_hub if answer.status_code != 202
    }
    assert client.post("/jobs", json=BODY | {"ratio": 0.95}).json()["code"] == "infeasible_budget"
    assert client.post("/estimates", json=BODY).json()["memory_bytes"] > 0
    lines = b'{"text": "' + b"a" * 1000 + b'"}\n'
    uploaded = client.post("/calibrations", content=lines * 30_000, headers={"Content-Type": "application/jsonl"})
    assert uploaded.json()["documents"] == 30_000
    for part in ("", "/events", "/layers", "/report", "/artifacts", "/artifacts/model.safetensors"):
        assert client.get(path + part).status_code == 200
    for other in ("/jobs", "/models", "/calibrations", "/healthz", "/readyz", "/openapi.json"):
        assert client.get(other).status_code == 200
    assert client.get(path, headers={"Prefer": "wait=1"}).json()["status"] == "succeeded"
    used = memory(process)
    assert used["VmHWM:"] < RESIDENT_LIMIT_MIB, used
    mapped = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
    assert not [name for name in ("libtorch", "_safetensors_rust", "libarrow") if name in mapped]
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=180)
    assert not HEAVY & set(json.loads(printed))
