"""A migrated database per test, a stopped clock, sample jobs, a worker's results, a service."""

import pytest
from starlette.testclient import TestClient

from app.main import create_app
from app.shared.database import Database
from app.shared.outcomes import JobResult, NewArtifact
from app.shared.repositories import jobs
from app.shared.requests import JobRequest
from app.shared.settings import Settings
from rocket_core.allocation.predictor import ModelProfile
from rocket_core.candidates import Candidate, LayerProfile
from tests.reference.reports import empty_report
from tests.reference.safetensors_files import save_llama


class Clock:
    """A clock that only advances on request."""

    def __init__(self):
        self.seconds = 1_800_000_000.0

    def __call__(self):
        return self.seconds

    def advance(self, seconds):
        self.seconds += seconds


def local_client(app, **options):
    """Return a client on this machine's loopback, which the service considers local."""
    return TestClient(
        app, base_url="http://localhost", client=("127.0.0.1", 50000), raise_server_exceptions=False, **options
    )


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith("ROCKET_") or name == "HF_TOKEN":
            monkeypatch.delenv(name)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def database_url(copy_database, tmp_path):
    return copy_database(tmp_path / "rocket.sqlite3")


@pytest.fixture
def database(database_url, clock):
    database = Database(database_url, clock=clock)
    yield database
    database.close()


@pytest.fixture
def store_settings():
    """Return where artifacts are stored: in the data folder, unless a test overrides it."""
    return {}


@pytest.fixture
def settings(tmp_path, copy_database, database_kind, store_settings):
    url = copy_database(tmp_path / "data" / "rocket.sqlite3")
    # The file is at its default location.
    chosen = {} if database_kind == "sqlite" else {"database_url": url}
    limits = {"max_body_bytes": 4096, "max_upload_bytes": 2**17}
    settings = Settings(data_dir=tmp_path / "data", **limits, **chosen, **store_settings)
    save_llama(settings.models_folder / "tiny")
    settings.datasets_folder.mkdir()
    (settings.datasets_folder / "mine.jsonl").touch()
    return settings


@pytest.fixture
def app(settings):
    app = create_app(settings)
    yield app
    # Tests that do not start the application do not shut it down either.
    app.state.context.database.close()


@pytest.fixture
def context(app):
    return app.state.context


@pytest.fixture
def client(app):
    with local_client(app) as client:
        yield client


@pytest.fixture
def request_body():
    return JobRequest(model_id="local/tiny", ratio=0.3)


@pytest.fixture
def submit(database, request_body):
    def submit(request=request_body, *, max_attempts=3, **options):
        with database.transaction() as session:
            return jobs.create_job(session, request, max_attempts=max_attempts, **options).job.id

    return submit


@pytest.fixture
def dense():
    return Candidate(kind="dense", kept_parameters=64, stored_bytes=256, reconstruction_error=0, weight_error=0)


@pytest.fixture
def factored():
    return Candidate(
        kind="factored",
        rank=2,
        nnz=10,
        kept_parameters=26,
        stored_bytes=120,
        reconstruction_error=0.1,
        weight_error=0.2,
    )


@pytest.fixture
def profile(dense, factored):
    def profile(name):
        return LayerProfile(name=name, d_in=8, d_out=8, input_group=name, tokens=100, candidates=(dense, factored))

    return profile


@pytest.fixture
def model_profile(profile):
    """Return two equal layers of 64 parameters, in a model with 100 bytes of other weights."""
    return ModelProfile(
        fingerprint="f" * 64,
        model="tiny",
        revision="sha256:0",
        settings={"seed": 0},
        objective="whitened",
        budget_unit="parameters",
        cap_slack=0.0,
        itemsize=4,
        model_parameters=153,
        dense_bytes=612,
        other_bytes=100,
        layers=(profile("b"), profile("a")),
    )


@pytest.fixture
def report():
    return empty_report()


@pytest.fixture
def result():
    return JobResult(
        achieved_ratio=0.3,
        kept_parameters=7,
        compressible_parameters=10,
        stored_bytes=70,
        dense_bytes=100,
        quality="10 → 10.2",
    )


@pytest.fixture
def artifact():
    return NewArtifact(name="rocket/model.safetensors", storage_key="a" * 32, size=3, sha256="0" * 64)
