"""A service without workers: the tests do what a worker would do."""

import socket
import threading
from datetime import timedelta

import pytest
import uvicorn

from app.shared.outcomes import NewArtifact
from app.shared.repositories import keys, leases, outputs, profiles

BODY = {"model_id": "local/tiny", "ratio": 0.3}


@pytest.fixture
def submitted(client):
    return client.post("/jobs", json=BODY).json()["id"]


class Worker:
    """A stand-in that does to a job what a worker does."""

    def __init__(self, context, profile, factored, report, result, model_profile=None):
        self.context, self.profile, self.factored = context, profile, factored
        self.model_profile = model_profile
        self.report, self.result = report, result

    def do(self, function, *arguments, **options):
        with self.context.database.transaction() as session:
            return function(session, *arguments, **options)

    def claim(self, job_id):
        return self.do(leases.claim_job, job_id, worker="w", lease_seconds=60)

    def fail(self, job_id, error):
        return self.do(leases.fail_job, self.claim(job_id), error)

    def profile_layers(self, lease):
        for position, name in enumerate(("b", "a")):
            self.do(outputs.save_layer_profile, lease, position, self.profile(name))

    def profile_model(self, job_id, fingerprint=None):
        return self.save_profile(self.claim(job_id), fingerprint)

    def save_profile(self, lease, fingerprint=None):
        model = self.model_profile
        if fingerprint is not None:
            model = model.model_copy(update={"fingerprint": fingerprint})
        predictor, most = model.predictor(), self.context.settings.max_profiles
        return self.do(profiles.save_profile, lease, model, predictor.frontier(), predictor.reachable_ratio, most=most)

    def succeed(self, job_id, files, *, retention=timedelta(days=7)):
        lease = self.claim(job_id)
        self.profile_layers(lease)
        self.do(outputs.save_allocation, lease, [("b", self.factored), ("a", self.factored)])
        options = {"result": self.result, "report": self.report, "artifacts": self.store(files), "retention": retention}
        return self.do(outputs.succeed_job, lease, **options)

    def store(self, files):
        artifacts = []
        for name, content in files.items():
            source = self.context.settings.data_dir / "made"
            source.write_bytes(content)
            stored = self.context.artifacts.put(source)
            source.unlink()
            artifacts.append(NewArtifact(name=name, storage_key=stored.key, size=stored.size, sha256=stored.sha256))
        return artifacts


@pytest.fixture
def worker(context, profile, model_profile, factored, report, result):
    return Worker(context, profile, factored, report, result, model_profile)


@pytest.fixture
def bearer(context):
    """Return the header with a new key of a tenant."""

    def bearer(tenant):
        with context.database.transaction() as session:
            return {"Authorization": f"Bearer {keys.create_key(session, tenant).text}"}

    return bearer


@pytest.fixture
def url(app):
    """Return the address of the service, served on its own socket."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()
