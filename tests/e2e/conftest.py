"""Services that offer a small model, on SQLite alone or on Postgres and Redis."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.e2e.deployment import Deployment
from tests.e2e.kill_matrix import uninterrupted
from tests.e2e.service_process import Service
from tests.e2e.watching import BLOCKS, REQUEST

MODEL = Path(__file__).parents[2] / "examples" / "tiny-llama"
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """Return a folder with the bundled model's tokenizer and a random model, which is compressed in seconds."""
    folder = tmp_path_factory.mktemp("small") / "tiny-llama"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = LlamaConfig.from_pretrained(MODEL, num_hidden_layers=BLOCKS, **SMALL)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def start_service(tmp_path, database_kind, small_model, request):
    """Start services on one data folder; all are stopped at the end of the test."""
    started, made = [], []

    def build(data_dir, settings):
        if database_kind == "sqlite":
            return Service(data_dir, **settings)
        server = request.getfixturevalue("postgres")
        made.append((server, server.create()))
        urls = {
            "ROCKET_DATABASE_URL": server.url(made[-1][1]),
            "ROCKET_BROKER_URL": request.getfixturevalue("redis_server").url,
        }
        return Deployment(data_dir, **(urls | settings))

    def start(name="data", **settings):
        data_dir = tmp_path / name
        if not (data_dir / "models" / "tiny-llama").exists():
            shutil.copytree(small_model, data_dir / "models" / "tiny-llama")
        service = build(data_dir, settings)
        started.append(service)
        return service

    yield start
    for service in started:
        service.close()
    for server, name in made:
        server.drop(name)


@pytest.fixture(scope="module")
def finished_job(tmp_path_factory, small_model):
    """Return a service, still running, and one of its jobs that was not interrupted."""
    data_dir = tmp_path_factory.mktemp("uninterrupted") / "data"
    (data_dir / "models").mkdir(parents=True)
    (data_dir / "models" / "tiny-llama").symlink_to(small_model)
    service = Service(data_dir)
    try:
        job_id = service.submit(**REQUEST)
        assert service.finished(job_id)["status"] == "succeeded"
        yield service, job_id
    finally:
        service.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory, small_model):
    """Return hashes of what the library itself makes of the model as those jobs request, without a service."""
    return uninterrupted(small_model, tmp_path_factory.mktemp("expected") / "out", REQUEST)
