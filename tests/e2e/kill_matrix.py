"""Where a service is killed, how it is observed until the end, and what must hold there."""

import hashlib
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil

from app.shared.database import Database
from app.shared.models import Artifact, Job, JobEvent, LayerProfileRow
from app.shared.repositories import jobs
from app.shared.settings import Settings
from rocket_core.config import compression_config
from rocket_core.pipeline import compress
from tests.e2e.service_process import command_line
from tests.reference.tiny_models import save_tiny_model
from worker.reconciler import Reconciler

MODEL = "org/tiny"
REQUEST = {
    "model_id": MODEL,
    "ratio": 0.3,
    "calibration": {"samples": 2, "sequence_length": 16},
    "options": {"export": ["rocket", "dense"]},
}
LAYERS = 14
FAILPOINTS = Path(__file__).parent / "failpoints"
ROOT = Path(__file__).parents[2]
KEY = {"Idempotency-Key": "kill-matrix"}
# One for every place, and some.
MAX_ATTEMPTS = 20
_DAY = 86400.0
# How many levels below the worker a process is.
_DEPTHS = {"worker": 0, "template": 1, "job": 2, "compute": 3, "fetch": 3}
GENERATIONS = ("self", "parent", "grandparent", "great-grandparent")
ATTEMPT_PROCESSES = frozenset(_DEPTHS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failpoint:
    """A place at which a process is killed.

    Attributes:
        name: of the place.
        function: `module:Class.function`.
        when: before or after it.
        call: which call of it in one process.
        where: the process that comes there: api, worker (with its reconciler), job, or its compute or fetch.
        with_answer: whether calls that return None do not count.
    """

    name: str
    function: str
    when: str
    call: int = 1
    where: str = "compute"
    with_answer: bool = False

    def point(self, victim: str | None = None) -> dict:
        """Return the failpoint in the form that `failpoints/sitecustomize.py` reads."""
        if victim is None or victim == self.where:
            victim = "self"
        elif victim in _DEPTHS:
            victim = GENERATIONS[_DEPTHS[self.where] - _DEPTHS[victim]]
        fields = {field: getattr(self, field) for field in ("name", "function", "when", "call", "with_answer")}
        return fields | {"victim": victim}


POINTS = (
    # Accepted and committed, but the client has had no response, and no worker has been notified.
    Failpoint(name="after-commit", function="app.services.jobs:submit_job", when="after", where="api"),
    Failpoint(name="before-publish", function="app.shared.queue:notify", when="before", where="reconciler"),
    Failpoint(
        name="after-claim", function="worker.runner:Runner._claim", when="after", where="worker", with_answer=True
    ),
    # A file is complete, but not yet in its place.
    Failpoint(name="mid-download", function="huggingface_hub.file_download:http_get", when="after", where="fetch"),
    Failpoint(name="mid-layer", function="rocket_core.methods.sparse:profile", when="before", call=3),
    Failpoint(
        name="layer-file-no-row",
        function="app.shared.repositories.outputs:save_layer_profile",
        when="before",
        call=4,
        where="job",
    ),
    # The first write checks the lease, and the next ones are rows of layers.
    Failpoint(
        name="after-row", function="worker.attempt.writer:ProgressWriter.write", when="after", call=6, where="job"
    ),
    # The same in the compute process.
    Failpoint(name="after-layer", function="worker.confined.messenger:Messenger.on_profile", when="after", call=6),
    Failpoint(name="after-allocation", function="worker.confined.messenger:Messenger.on_allocation", when="after"),
    # The first export is complete, the second has its weights.
    Failpoint(name="mid-save", function="rocket_core.pipeline.stages.export:_write_config", when="before", call=2),
    # Two files of the store are there, one of them under a temporary name.
    Failpoint(name="mid-store", function="app.shared.storage.local:_link_or_copy", when="after", call=2, where="job"),
    # Everything is written, in a transaction that is still open.
    Failpoint(
        name="before-terminal-commit",
        function="app.shared.repositories.outputs:succeed_job",
        when="after",
        where="job",
    ),
    Failpoint(
        name="after-terminal-commit", function="app.shared.storage:WorkFolders.remove", when="before", where="job"
    ),
)


def save_model(folder: Path) -> dict[str, bytes]:
    """Create the model, and return its files as a hub has them."""
    save_tiny_model("llama", folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def uninterrupted(model: Path, output: Path, request: dict = REQUEST) -> dict[str, str]:
    """Return hashes of what the library itself makes of the model, uninterrupted and without a service."""
    config = compression_config(
        ratio=request["ratio"], calibration=request["calibration"], **request.get("options", {})
    )
    compress(str(model), output, config)
    return {
        file.relative_to(output).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for kind in config.export
        for file in (output / kind).iterdir()
        if file.name not in {"report.json", "report.html", "README.md"}
    }


def environment(marks: Path, points: list[dict], hub: str, home: Path) -> dict[str, str]:
    """Return the settings of a service that is killed; jobs are retried at once."""
    marks.mkdir(exist_ok=True)
    plan = _plan(marks)
    plan.parent.mkdir(exist_ok=True)
    plan.write_text(json.dumps({"folder": str(marks), "points": points}))
    shutil.copy(FAILPOINTS / "sitecustomize.py", plan.parent)
    return {
        "PYTHONPATH": f"{plan.parent}:{ROOT}",
        "HF_ENDPOINT": hub,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "ROCKET_MAX_ATTEMPTS": str(MAX_ATTEMPTS),
        "ROCKET_RETRY_BACKOFF_SECONDS": "0",
    }


def _plan(marks: Path) -> Path:
    return marks.with_name(f"{marks.name}-failpoints") / "failpoints.json"


def submit(service, marks: Path) -> str:
    """Submit the job like a client that repeats its request until it is answered."""
    while True:
        _name_api(service, marks)
        try:
            answer = service.client.post("/jobs", json=REQUEST, headers=KEY)
        except httpx2.HTTPError:
            service.revive()
            continue
        assert answer.status_code in {200, 202}, answer.text
        return answer.json()["id"]


def run_to_end(service, marks: Path, job_id: str, *, seconds: float) -> dict:
    """Restart what dies until the job has ended and all failpoints have struck; return the job."""
    until = time.monotonic() + seconds
    wanted = {point["name"] for point in json.loads(_plan(marks).read_text())["points"]}
    while True:
        service.revive()
        _name_api(service, marks)
        try:
            job = service.job(job_id)
        except httpx2.HTTPError:
            continue
        struck = {mark.name for mark in marks.iterdir()} & wanted
        if job["status"] not in {"queued", "running"} and (struck == wanted or not service.children()):
            return job
        assert time.monotonic() < until, (job, wanted - struck, service.log.read_text()[-3000:])
        time.sleep(0.1)


def settings_of(service) -> Settings:
    """Return the service's settings, to inspect its database directly."""
    database = service.environment.get("ROCKET_DATABASE_URL")
    return Settings(data_dir=service.data_dir, **({"database_url": database} if database else {}))


def assert_promise(service, job_id: str, expected: dict[str, str]) -> None:
    """Check what must hold of a job that has succeeded despite all kills, and stop the service."""
    job, found = service.job(job_id), service.hashes(job_id)
    others = {name for name, _ in found.items() ^ expected.items()}
    assert job["status"] == "succeeded", (job, service.log.read_text()[-3000:])
    assert not others, (others, job, service.log.read_text()[-3000:])
    service.stop()
    settings = settings_of(service)
    database = Database(settings.database)
    with database.snapshot() as session:
        job = jobs.get_job(session, job_id)
        assert job.status == "succeeded"
        assert 1 <= job.attempt <= job.max_attempts
        assert session.query(Job).count() == 1
        told = session.query(JobEvent).filter_by(job_id=job_id).order_by(JobEvent.sequence).all()
        assert [event.sequence for event in told] == list(range(1, len(told) + 1))
        layers = [event.data["layer"] for event in told if event.type == "layer"]
        assert len(layers) == len(set(layers)) == LAYERS
        assert [event.type for event in told].count("allocation") == 1
        assert [event.data.get("status") for event in told].count("succeeded") == 1
        rows = [row.name for row in session.query(LayerProfileRow).order_by(LayerProfileRow.position)]
        assert sorted(rows) == sorted(layers)
        artifacts = {row.storage_key: row.sha256 for row in session.query(Artifact)}
    # Files left by crashes are swept once they are old enough.
    with _later():
        Reconciler(settings, database).clean()
    database.close()
    stored = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in _files(settings, "artifacts")}
    assert stored == artifacts
    assert _files(settings, "work") == []
    assert [process.pid for process in psutil.process_iter() if job_id in command_line(process)] == []


def _files(settings: Settings, folder: str) -> list[Path]:
    return list((settings.data_dir / folder).iterdir())


def _name_api(service, marks: Path) -> None:
    # Atomic, because the process that is about to kill it may read at any moment, and an empty file would be an error.
    new = marks / "api.new"
    new.write_text(str(service.process.pid))
    new.replace(marks / "api")


class _later:
    """A context in which this process's clock is a day ahead."""

    def __enter__(self):
        self._real = time.time
        time.time = lambda: self._real() + _DAY

    def __exit__(self, *_):
        time.time = self._real
