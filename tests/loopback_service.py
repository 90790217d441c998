"""The real service on the loopback interface, without workers: the tests do what a worker would do."""

import hashlib
import secrets
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import uvicorn

from app.main import create_app
from app.shared.database import Database
from app.shared.outcomes import JobError, JobResult, NewArtifact, NewEvent
from app.shared.repositories import jobs, leases, outputs, profiles
from app.shared.requests import JobRequest
from app.shared.settings import Settings
from app.shared.storage import open_store
from rocket_core.allocation.predictor import ModelProfile
from rocket_core.candidates import Candidate, LayerProfile
from tests.job_events import add_event
from tests.rocket_cli.fakes import build_report

# A server that, unlike a thread, can be killed.
_PROGRAM = """
import sys
from pathlib import Path
import uvicorn
from app.main import create_app
from app.shared.settings import Settings
application = create_app(Settings(data_dir=Path(sys.argv[1])))
uvicorn.run(application, port=int(sys.argv[2]), log_config=None, access_log=False)
"""

DENSE = Candidate(kind="dense", kept_parameters=64, stored_bytes=256, reconstruction_error=0, weight_error=0)
FACTORED = Candidate(
    kind="factored", rank=2, nnz=10, kept_parameters=26, stored_bytes=120, reconstruction_error=0.1, weight_error=0.2
)
RESULT = JobResult(
    achieved_ratio=0.3,
    kept_parameters=7_000_000,
    compressible_parameters=10_000_000,
    stored_bytes=7,
    dense_bytes=10,
    quality="10 → 10.2",
)


class Service:
    """Data of a service; `serving` and `ServerProcess` put servers in front of it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.database = Database(settings.database)
        self.artifacts = open_store(settings)

    def close(self):
        self.database.close()

    def do(self, function, *arguments, **options):
        with self.database.transaction() as session:
            return function(session, *arguments, **options)

    def submit(self, **request):
        body = JobRequest.model_validate({"model_id": "local/tiny", "ratio": 0.3} | request)
        return self.do(jobs.create_job, body, max_attempts=3).job.id

    def count_jobs(self):
        return self.do(jobs.count_active_jobs)

    def claim(self, job_id):
        return self.do(leases.claim_job, job_id, worker="w", lease_seconds=60)

    def progress(self, lease, stage, fraction, finish_at=None):
        self.do(outputs.report_progress, lease, stage=stage, progress=fraction, finish_at=finish_at)

    def profile(self, lease, name, position=0):
        profile = LayerProfile(name=name, d_in=8, d_out=8, input_group=name, tokens=100, candidates=(DENSE, FACTORED))
        self.do(outputs.save_layer_profile, lease, position, profile)

    def profile_model(self, lease, fingerprint="0" * 64):
        """Save a profile of two layers of 64 parameters in a model with 100 bytes of other weights; return its id."""
        layers = tuple(
            LayerProfile(name=name, d_in=8, d_out=8, input_group=name, tokens=100, candidates=(DENSE, FACTORED))
            for name in ("q", "v")
        )
        whole = ModelProfile(
            fingerprint=fingerprint,
            model="tiny",
            revision="0",
            settings={},
            objective="whitened",
            budget_unit="parameters",
            cap_slack=0,
            itemsize=4,
            model_parameters=153,
            dense_bytes=612,
            other_bytes=100,
            layers=layers,
        )
        predictor, most = whole.predictor(), self.settings.max_profiles
        return self.do(profiles.save_profile, lease, whole, predictor.frontier(), predictor.reachable_ratio, most=most)

    def warn(self, lease, message):
        self.do(add_event, lease, NewEvent(type="message", level="warning", message=message))

    def fail(self, lease, error=None):
        error = error or JobError(code="corrupt_checkpoint", message="a file is damaged", stage="preflight")
        self.do(leases.fail_job, lease, error)

    def publish(self, name, content):
        source = self.settings.data_dir / secrets.token_hex(4)
        source.write_bytes(content)
        stored = self.artifacts.put(source)
        source.unlink()
        return NewArtifact(name=name, storage_key=stored.key, size=stored.size, sha256=stored.sha256)

    def succeed(self, lease, files, *, retention=timedelta(days=7), report=None, verdict=None):
        artifacts = [self.publish(name, content) for name, content in files.items()]
        self.do(outputs.save_allocation, lease, [("model.layers.0.q", FACTORED)])
        result = RESULT.model_copy(update={"verdict": verdict})
        options = {"result": result, "report": report or build_report(), "artifacts": artifacts, "retention": retention}
        self.do(outputs.succeed_job, lease, **options)

    def succeeded(self, files, **options):
        job_id = self.submit()
        self.succeed(self.claim(job_id), files, **options)
        return job_id

    def stored_file(self, content):
        """Return where the service stores a published content."""
        wanted = hashlib.sha256(content).hexdigest()
        folder = self.settings.data_dir / "artifacts"
        return next(file for file in folder.iterdir() if hashlib.sha256(file.read_bytes()).hexdigest() == wanted)


class Server:
    """A server in a thread of this process."""

    ending: ClassVar = []

    def __init__(self, settings: Settings) -> None:
        self.application = create_app(settings)
        self._socket = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(self.application, log_config=None, access_log=False, timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self):
        self._thread.start()
        wait_for(lambda: self._server.started)
        return self

    def __exit__(self, *error):
        self.application.state.streams.close()
        self._server.should_exit = True
        # It takes a while; the next test need not wait for it.
        self.ending.append((self._thread, self._socket))

    @classmethod
    def join(cls):
        for thread, listener in cls.ending:
            thread.join()
            listener.close()
        cls.ending.clear()


class ServerProcess:
    """A server in a separate process, which can be killed and restarted."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process = None

    def start(self):
        command = [sys.executable, "-c", _PROGRAM, str(self._data_dir), str(self.port)]
        self._process = subprocess.Popen(command)
        wait_for(lambda: _answers(self.port))

    def kill(self):
        self._process.kill()
        self._process.wait()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self.kill()


@contextmanager
def in_background(*steps):
    """Run steps in a thread, and fail if one of them fails."""
    errors = []

    def run():
        try:
            for step in steps:
                step()
        except BaseException as error:
            errors.append(error)
            raise

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert not errors


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def _answers(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
