"""Every status in the OpenAPI document is produced, and no other."""

import re
import socket
from dataclasses import replace
from datetime import timedelta
from types import MappingProxyType

import pytest
from huggingface_hub import constants
from sqlalchemy import update

from app.api.middleware.access import REFUSALS
from app.api.streams import Streams
from app.api.tenant_shares import TenantSlots
from app.api.uploaded_bodies import UploadReceiver
from app.shared.database import Database, downgrade
from app.shared.errors import DiskFullError
from app.shared.models import Artifact, Job
from app.shared.outcomes import JobError
from app.shared.repositories import sweeps
from app.shared.storage import LocalStore
from tests.app.api.conftest import BODY
from tests.reference.fake_hub import FakeHub
from tests.reference.model_uploads import announce, send_heads
from tests.reference.model_uploads import upload as upload_model
from tests.reference.safetensors_files import save_llama

pytestmark = pytest.mark.databases("sqlite", soak=("postgres",))

UNKNOWN = "/jobs/job_" + "0" * 26
NO_PROFILE = "/profiles/prof_" + "0" * 26
BROKEN = JobError(code="x", message="m")
FILE = "/artifacts/model.safetensors"
# Statuses that do not only come from rate limiting.
OTHER_REFUSALS = {
    ("get", "/jobs/{job_id}/events", 429),
    ("post", "/calibrations", 429),
    ("post", "/models", 429),
    ("post", "/webhooks", 429),
    ("put", "/models/{model_name}/files/{file}", 429),
}
NO_UPLOAD = "upload/" + "0" * 32


@pytest.fixture
def settings(settings):
    """Return a service without the limit that so many submissions in a minute would hit."""
    return settings.model_copy(update={"submit_rate_limit": "1000/minute"})


@pytest.fixture
def jobs(client, worker, context):
    """Return jobs in each state, created on demand."""

    class Jobs:
        @property
        def queued(self):
            return f"/jobs/{client.post('/jobs', json=BODY).json()['id']}"

        def _after(self, action, *arguments, **options):
            path = self.queued
            action(path.rsplit("/", 1)[-1], *arguments, **options)
            return path

        @property
        def running(self):
            return self._after(worker.claim)

        @property
        def profile(self):
            return f"/profiles/{worker.profile_model(self.queued.rsplit('/', 1)[-1])}"

        @property
        def failed(self):
            return self._after(worker.fail, BROKEN)

        @property
        def succeeded(self):
            return self._after(worker.succeed, {"model.safetensors": b"0123456789", "report.json": b"{}"})

        @property
        def healable(self):
            return self._after(worker.succeed, {"rocket/model.safetensors": b"0123456789"})

        @property
        def healed_and_gone(self):
            """Return a job that was cancelled while it healed a result that no longer exists."""
            healable = self.healable
            path = client.post(f"{healable}/healings", json={"tokens": 5}).headers["Location"]
            client.post(f"{path}/cancel")
            self._expire(healable)
            return path

        def _expire(self, path):
            with context.database.transaction() as session:
                session.execute(
                    update(Artifact).where(Artifact.job_id == path.rsplit("/", 1)[-1]).values(storage_key=None)
                )

        @property
        def expired(self):
            path = self._after(worker.succeed, {"model.safetensors": b"0"}, retention=timedelta(0))
            for key in worker.do(sweeps.expire_artifacts):
                context.artifacts.remove(key)
            return path

    return Jobs()


def scenarios(client, jobs, app, settings, monkeypatch):
    """Return what leads to each documented status."""
    json_type, text_type = {"Content-Type": "application/json"}, {"Content-Type": "text/plain"}
    without_target = {name: value for name, value in BODY.items() if name != "ratio"}
    unknown_upload = {"calibration": {"dataset": NO_UPLOAD}}
    profile, allocations = "/profiles/{profile_id}", "/profiles/{profile_id}/allocations"
    healings = "/jobs/{job_id}/healings"
    evaluations = "/jobs/{job_id}/evaluations"
    webhook, link = "/webhooks/{webhook_id}", "/jobs/{job_id}/link"
    exports, dense = "/jobs/{job_id}/exports", {"to": "dense"}
    pushes, repository, own = "/jobs/{job_id}/pushes", {"repository": "a/b"}, {"Hub-Token": "hf_0123456789"}
    model, model_file = "/models/{model_name}", "/models/{model_name}/files/{file}"
    job, file = "/jobs/{job_id}", "/jobs/{job_id}/artifacts/{name}"

    def replay(path, body, key, headers=MappingProxyType({})):
        keyed = {"json": body, "headers": {"Idempotency-Key": key, **headers}}
        client.post(path, **keyed)
        return client.post(path, **keyed)

    def upload(content):
        return client.post("/calibrations", content=content, headers=text_type)

    def uploaded():
        return upload(b"three").headers["Location"]

    def one_in_use():
        path = upload(b"four").headers["Location"]
        dataset = path.removeprefix("/").replace("calibrations", "upload")
        assert client.post("/jobs", json=BODY | {"calibration": {"dataset": dataset}}).status_code == 202
        return client.delete(path)

    def with_limits(ask, **limits):
        context = app.state.context
        app.state.context = replace(context, settings=settings.model_copy(update=limits))
        answer = ask()
        app.state.context = context
        return answer

    def healed_without_a_hub():
        path = jobs.healable
        with app.state.context.database.transaction() as session:
            row = session.get(Job, path.rsplit("/", 1)[-1])
            row.request = row.request | {"model_id": "org/model"}
        return without_a_hub(f"{path}/healings", {"tokens": 5}, {})

    def announced(name, **sizes):
        files = [{"path": path, "size": size} for path, size in ({"model.safetensors": 2} | sizes).items()]
        return client.post("/models", json={"name": name, "files": [{"path": "config.json", "size": 2}, *files]})

    def sent(name, content=b"{}", file="config.json", size=2):
        announced(name)
        span = {"Content-Range": f"bytes 0-1/{size}"}
        return client.put(f"/models/{name}/files/{file}", content=content, headers=span)

    def hooked():
        return client.post("/webhooks", json={"url": "https://example.org/hook"})

    def linked():
        return client.post(f"{jobs.succeeded}/link", json={})

    def judged():
        folder = settings.models_folder / "tiny"
        announce(client, folder, "judged")
        send_heads(client, folder, "judged")
        return client.post("/models/judged/check")

    def refused():
        folder = save_llama(settings.data_dir / "quantized", config={"quantization_config": {"bits": 4}})
        announce(client, folder, "refused")
        send_heads(client, folder, "refused")
        return client.post("/models/refused/check")

    def one_model_in_use():
        upload_model(client, settings.models_folder / "tiny", "used")
        assert client.post("/jobs", json=BODY | {"model_id": "upload/used"}).status_code == 202
        return client.delete("/models/used")

    def without_receivers():
        receiver = app.state.upload_receiver
        app.state.upload_receiver = UploadReceiver(settings)
        app.state.upload_receiver._slots = TenantSlots(0, share=0)
        answer = sent("late")
        app.state.upload_receiver = receiver
        return answer

    def incomplete(path, body=BODY):
        announced("incomplete")
        return client.post(path, json=body | {"model_id": "upload/incomplete"})

    other_version = {"If-Match": '"other"'}

    def without_a_hub(path, body=BODY, named=MappingProxyType({"model_id": "org/model"})):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            FakeHub.replace(monkeypatch, f"http://127.0.0.1:{free.getsockname()[1]}")
        return client.post(path, json={**body, **named})

    def without_room(ask):
        def full(_self):
            raise DiskFullError("the database has no room left")

        with monkeypatch.context() as patch:
            patch.setattr(Database, "transaction", full)
            return ask()

    def evaluated_without_room():
        path = f"{jobs.healable}/evaluations"
        return without_room(lambda: client.post(path, json={}))

    def pushed(path=None, **sent):
        body = {"json": repository} | sent
        return client.post(f"{path or jobs.healable}/pushes", **body | {"headers": own | sent.get("headers", {})})

    def pushed_offline():
        with monkeypatch.context() as patch:
            patch.setattr(constants, "HF_HUB_OFFLINE", True)
            return pushed()

    def pushed_without_room():
        path = jobs.healable
        return without_room(lambda: pushed(path))

    def known():
        path = jobs.queued
        return client.get(path, headers={"If-None-Match": client.get(path).headers["ETag"]})

    def without_streams():
        app.state.streams = Streams(0, share=0)
        return client.get(f"{jobs.queued}/events", headers={"Accept": "text/event-stream"})

    def redirected():
        context = app.state.context
        sending = settings.model_copy(update={"redirect_downloads": True})
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "presigned_url", lambda *_arguments, **_options: "http://store.example/file")
            app.state.context = replace(context, settings=sending)
            answer = client.get(jobs.succeeded + FILE, follow_redirects=False)
            app.state.context = context
        return answer

    def without_schema():
        downgrade(settings.database, "base")
        return client.get("/readyz")

    return {
        ("post", "/jobs", 202): lambda: client.post("/jobs", json=BODY),
        ("post", "/jobs", 200): lambda: replay("/jobs", BODY, "k"),
        ("post", "/jobs", 400): lambda: client.post("/jobs", content=b"\xff", headers=json_type),
        ("post", "/jobs", 413): lambda: client.post("/jobs", content=b" " * 5000, headers=json_type),
        ("post", "/jobs", 415): lambda: client.post("/jobs", content=b"{}", headers={"Content-Type": "text/plain"}),
        ("post", "/jobs", 422): lambda: client.post("/jobs", json={}),
        ("post", "/jobs", 503): lambda: without_a_hub("/jobs"),
        ("post", "/jobs", 507): lambda: without_room(lambda: client.post("/jobs", json=BODY)),
        ("get", "/jobs", 200): lambda: client.get("/jobs"),
        ("get", "/jobs", 422): lambda: client.get("/jobs?limit=0"),
        ("get", job, 200): lambda: client.get(jobs.queued),
        ("get", job, 304): known,
        ("get", job, 404): lambda: client.get("/jobs/x"),
        ("get", job, 412): lambda: client.get(jobs.queued, headers=other_version),
        ("delete", job, 204): lambda: client.delete(jobs.failed),
        ("delete", job, 404): lambda: client.delete(UNKNOWN),
        ("delete", job, 409): lambda: client.delete(jobs.running),
        ("delete", job, 412): lambda: client.delete(jobs.failed, headers=other_version),
        ("post", f"{job}/cancel", 200): lambda: client.post(f"{jobs.queued}/cancel"),
        ("post", f"{job}/cancel", 202): lambda: client.post(f"{jobs.running}/cancel"),
        ("post", f"{job}/cancel", 404): lambda: client.post(f"{UNKNOWN}/cancel"),
        ("post", f"{job}/cancel", 409): lambda: client.post(f"{jobs.succeeded}/cancel"),
        ("post", f"{job}/retry", 202): lambda: client.post(f"{jobs.failed}/retry"),
        ("post", f"{job}/retry", 404): lambda: client.post(f"{UNKNOWN}/retry"),
        ("post", f"{job}/retry", 409): lambda: client.post(f"{jobs.succeeded}/retry"),
        ("post", f"{job}/retry", 410): lambda: client.post(f"{jobs.healed_and_gone}/retry"),
        ("post", healings, 202): lambda: client.post(f"{jobs.healable}/healings", json={"tokens": 5}),
        ("post", healings, 200): lambda: replay(f"{jobs.healable}/healings", {"tokens": 5}, "h"),
        ("post", healings, 400): lambda: client.post(f"{jobs.healable}/healings", content=b"{", headers=json_type),
        ("post", healings, 404): lambda: client.post(f"{UNKNOWN}/healings", json={"tokens": 5}),
        ("post", healings, 409): lambda: client.post(f"{jobs.failed}/healings", json={"tokens": 5}),
        ("post", healings, 410): lambda: client.post(f"{jobs.expired}/healings", json={"tokens": 5}),
        ("post", healings, 413): lambda: client.post(
            f"{jobs.healable}/healings", content=b" " * 5000, headers=json_type
        ),
        ("post", healings, 415): lambda: client.post(f"{jobs.healable}/healings", content=b"{}", headers=text_type),
        ("post", healings, 422): lambda: client.post(f"{jobs.healable}/healings", json={"tokens": 0}),
        ("post", healings, 503): healed_without_a_hub,
        ("post", healings, 507): lambda: without_room(
            lambda path=jobs.healable: client.post(f"{path}/healings", json={"tokens": 5})
        ),
        ("get", f"{job}/events", 200): lambda: client.get(f"{jobs.queued}/events"),
        ("get", f"{job}/events", 404): lambda: client.get(f"{UNKNOWN}/events"),
        ("get", f"{job}/events", 422): lambda: client.get(f"{jobs.queued}/events?after=-1"),
        ("get", f"{job}/events", 429): without_streams,
        ("get", f"{job}/layers", 200): lambda: client.get(f"{jobs.succeeded}/layers"),
        ("get", f"{job}/layers", 404): lambda: client.get(f"{UNKNOWN}/layers"),
        ("get", f"{job}/report", 200): lambda: client.get(f"{jobs.succeeded}/report"),
        ("get", f"{job}/report", 404): lambda: client.get(f"{UNKNOWN}/report"),
        ("get", f"{job}/report", 409): lambda: client.get(f"{jobs.failed}/report"),
        ("get", f"{job}/artifacts", 200): lambda: client.get(f"{jobs.succeeded}/artifacts"),
        ("get", f"{job}/artifacts", 404): lambda: client.get(f"{UNKNOWN}/artifacts"),
        ("get", file, 200): lambda: client.get(jobs.succeeded + FILE),
        ("get", file, 206): lambda: client.get(jobs.succeeded + FILE, headers={"Range": "bytes=1-2"}),
        ("get", file, 304): lambda: client.get(jobs.succeeded + FILE, headers={"If-None-Match": "*"}),
        ("get", file, 307): redirected,
        ("get", file, 404): lambda: client.get(jobs.succeeded + "/artifacts/none"),
        ("get", file, 410): lambda: client.get(jobs.expired + FILE),
        ("get", file, 412): lambda: client.get(jobs.succeeded + FILE, headers=other_version),
        ("get", file, 416): lambda: client.get(jobs.succeeded + FILE, headers={"Range": "bytes=99-"}),
        ("post", "/jobs", 404): lambda: client.post("/jobs", json=BODY | unknown_upload),
        ("post", f"{job}/retry", 422): lambda: client.post(f"{jobs.failed}/retry", headers={"Hub-Token": "x"}),
        ("get", "/profiles", 200): lambda: client.get("/profiles"),
        ("get", "/profiles", 422): lambda: client.get("/profiles?after=x"),
        ("post", "/profiles", 202): lambda: client.post("/profiles", json=without_target),
        ("post", evaluations, 202): lambda: client.post(f"{jobs.healable}/evaluations", json={}),
        ("post", evaluations, 200): lambda: replay(f"{jobs.healable}/evaluations", {}, "e"),
        ("post", evaluations, 400): lambda: client.post(
            f"{jobs.healable}/evaluations", content=b"{", headers=json_type
        ),
        ("post", evaluations, 404): lambda: client.post(f"{UNKNOWN}/evaluations", json={}),
        ("post", evaluations, 409): lambda: client.post(f"{jobs.failed}/evaluations", json={}),
        ("post", evaluations, 410): lambda: client.post(f"{jobs.expired}/evaluations", json={}),
        ("post", evaluations, 413): lambda: client.post(
            f"{jobs.healable}/evaluations", content=b" " * 5000, headers=json_type
        ),
        ("post", evaluations, 415): lambda: client.post(
            f"{jobs.healable}/evaluations", content=b"{}", headers=text_type
        ),
        ("post", evaluations, 422): lambda: client.post(f"{jobs.healable}/evaluations", json={"prompts": [""]}),
        ("post", evaluations, 507): evaluated_without_room,
        ("post", exports, 202): lambda: client.post(f"{jobs.healable}/exports", json=dense),
        ("post", exports, 200): lambda: replay(f"{jobs.healable}/exports", dense, "x"),
        ("post", exports, 400): lambda: client.post(f"{jobs.healable}/exports", content=b"{", headers=json_type),
        ("post", exports, 404): lambda: client.post(f"{UNKNOWN}/exports", json=dense),
        ("post", exports, 409): lambda: client.post(f"{jobs.failed}/exports", json=dense),
        ("post", exports, 410): lambda: client.post(f"{jobs.expired}/exports", json=dense),
        ("post", exports, 413): lambda: client.post(f"{jobs.healable}/exports", content=b" " * 5000, headers=json_type),
        ("post", exports, 415): lambda: client.post(f"{jobs.healable}/exports", content=b"{}", headers=text_type),
        ("post", exports, 422): lambda: client.post(f"{jobs.healable}/exports", json={"to": "onnx"}),
        ("post", exports, 507): lambda: without_room(
            lambda path=jobs.healable: client.post(f"{path}/exports", json=dense)
        ),
        ("post", pushes, 202): pushed,
        ("post", pushes, 200): lambda: replay(f"{jobs.healable}/pushes", repository, "y", own),
        ("post", pushes, 400): lambda: pushed(json=None, content=b"{", headers=json_type),
        ("post", pushes, 404): lambda: pushed(UNKNOWN),
        ("post", pushes, 409): lambda: pushed(jobs.failed),
        ("post", pushes, 410): lambda: pushed(jobs.expired),
        ("post", pushes, 413): lambda: pushed(json=None, content=b" " * 5000, headers=json_type),
        ("post", pushes, 415): lambda: pushed(json=None, content=b"{}", headers=text_type),
        ("post", pushes, 422): lambda: pushed(json={"repository": "a"}),
        ("post", pushes, 503): pushed_offline,
        ("post", pushes, 507): pushed_without_room,
        ("get", pushes, 200): lambda: client.get(f"{jobs.healable}/pushes"),
        ("get", pushes, 404): lambda: client.get(f"{UNKNOWN}/pushes"),
        ("get", exports, 200): lambda: client.get(f"{jobs.healable}/exports"),
        ("get", exports, 404): lambda: client.get(f"{UNKNOWN}/exports"),
        ("get", evaluations, 200): lambda: client.get(f"{jobs.healable}/evaluations"),
        ("get", evaluations, 404): lambda: client.get(f"{UNKNOWN}/evaluations"),
        ("post", "/profiles", 200): lambda: replay("/profiles", without_target, "p"),
        ("post", "/profiles", 400): lambda: client.post("/profiles", content=b"{", headers=json_type),
        ("post", "/profiles", 404): lambda: client.post("/profiles", json=without_target | unknown_upload),
        ("post", "/profiles", 413): lambda: client.post("/profiles", content=b" " * 5000, headers=json_type),
        ("post", "/profiles", 415): lambda: client.post("/profiles", content=b"{}", headers=text_type),
        ("post", "/profiles", 422): lambda: client.post("/profiles", json=BODY),
        ("post", "/profiles", 503): lambda: without_a_hub("/profiles", without_target),
        ("post", "/profiles", 507): lambda: without_room(lambda: client.post("/profiles", json=without_target)),
        ("get", profile, 200): lambda: client.get(jobs.profile),
        ("get", profile, 404): lambda: client.get(NO_PROFILE),
        ("delete", profile, 204): lambda: client.delete(jobs.profile),
        ("delete", profile, 404): lambda: client.delete(NO_PROFILE),
        ("get", f"{profile}/frontier", 200): lambda: client.get(f"{jobs.profile}/frontier"),
        ("get", f"{profile}/frontier", 404): lambda: client.get(f"{NO_PROFILE}/frontier"),
        ("post", allocations, 200): lambda: client.post(f"{jobs.profile}/allocations", json={"ratio": 0.2}),
        ("post", allocations, 400): lambda: client.post(f"{jobs.profile}/allocations", content=b"{", headers=json_type),
        ("post", allocations, 404): lambda: client.post(f"{NO_PROFILE}/allocations", json={"ratio": 0.2}),
        ("post", allocations, 413): lambda: client.post(
            f"{jobs.profile}/allocations", content=b" " * 5000, headers=json_type
        ),
        ("post", allocations, 415): lambda: client.post(
            f"{jobs.profile}/allocations", content=b"{}", headers=text_type
        ),
        ("post", allocations, 422): lambda: client.post(f"{jobs.profile}/allocations", json={"ratio": 0.9}),
        ("post", "/estimates", 200): lambda: client.post("/estimates", json=BODY),
        ("post", "/estimates", 400): lambda: client.post("/estimates", content=b"{", headers=json_type),
        ("post", "/estimates", 404): lambda: client.post("/estimates", json=BODY | unknown_upload),
        ("post", "/estimates", 413): lambda: client.post("/estimates", content=b" " * 5000, headers=json_type),
        ("post", "/estimates", 415): lambda: client.post("/estimates", content=b"{}", headers=text_type),
        ("post", "/estimates", 422): lambda: client.post("/estimates", json=BODY | {"ratio": 0.95}),
        ("post", "/estimates", 503): lambda: without_a_hub("/estimates"),
        ("post", "/calibrations", 201): lambda: upload(b"one"),
        ("post", "/calibrations", 200): lambda: upload(b"one"),
        ("post", "/calibrations", 413): lambda: upload(b" " * (settings.max_upload_bytes + 1)),
        ("post", "/calibrations", 415): lambda: client.post("/calibrations", content=b"x"),
        ("post", "/calibrations", 422): lambda: upload(b"\0"),
        ("post", "/calibrations", 429): lambda: with_limits(lambda: upload(b"five"), max_uploads=0),
        ("post", "/calibrations", 507): lambda: without_room(lambda: upload(b"two")),
        ("get", "/calibrations/{upload_id}", 200): lambda: client.get(uploaded()),
        ("get", "/calibrations/{upload_id}", 404): lambda: client.get("/calibrations/x"),
        ("delete", "/calibrations/{upload_id}", 204): lambda: client.delete(uploaded()),
        ("delete", "/calibrations/{upload_id}", 404): lambda: client.delete("/calibrations/" + "0" * 32),
        ("delete", "/calibrations/{upload_id}", 409): one_in_use,
        ("get", "/models", 200): lambda: client.get("/models"),
        ("post", "/models", 201): lambda: announced("new"),
        ("post", "/models", 200): lambda: announced("new"),
        ("post", "/models", 400): lambda: client.post("/models", content=b"{", headers=json_type),
        ("post", "/models", 409): lambda: announced("new", **{"tokenizer.json": 1}),
        ("post", "/models", 413): lambda: client.post("/models", content=b" " * 5000, headers=json_type),
        ("post", "/models", 415): lambda: client.post("/models", content=b"{}", headers=text_type),
        ("post", "/models", 422): lambda: announced("new", **{"model.py": 1}),
        ("post", "/models", 429): lambda: with_limits(lambda: announced("more"), max_models=0),
        ("post", "/models", 507): lambda: without_room(lambda: announced("another")),
        ("get", model, 200): lambda: client.get("/models/new"),
        ("get", model, 404): lambda: client.get("/models/none"),
        ("get", model_file, 200): lambda: client.get("/models/new/files/config.json"),
        ("get", model_file, 404): lambda: client.get("/models/new/files/none"),
        ("put", model_file, 200): lambda: sent("new"),
        ("put", model_file, 404): lambda: sent("new", file="none"),
        ("put", model_file, 409): lambda: sent("new", b"[]"),
        ("put", model_file, 413): lambda: sent("new", bytes(settings.max_upload_bytes + 1)),
        ("put", model_file, 422): lambda: sent("new", size=3),
        ("put", model_file, 429): without_receivers,
        ("put", model_file, 507): lambda: without_room(lambda: sent("new")),
        ("post", f"{model}/check", 200): judged,
        ("post", f"{model}/check", 404): lambda: client.post("/models/none/check"),
        ("post", f"{model}/check", 409): lambda: client.post("/models/new/check"),
        ("post", f"{model}/check", 422): refused,
        ("post", "/jobs", 409): lambda: incomplete("/jobs"),
        ("post", "/estimates", 409): lambda: incomplete("/estimates"),
        ("post", "/profiles", 409): lambda: incomplete("/profiles", without_target),
        ("delete", model, 204): lambda: client.delete("/models/new"),
        ("delete", model, 404): lambda: client.delete("/models/new"),
        ("delete", model, 409): one_model_in_use,
        ("get", "/calibrations", 200): lambda: client.get("/calibrations"),
        ("post", "/webhooks", 201): hooked,
        ("post", "/webhooks", 400): lambda: client.post("/webhooks", content=b"{", headers=json_type),
        ("post", "/webhooks", 413): lambda: client.post("/webhooks", content=b" " * 5000, headers=json_type),
        ("post", "/webhooks", 415): lambda: client.post("/webhooks", content=b"{}", headers=text_type),
        ("post", "/webhooks", 422): lambda: client.post("/webhooks", json={"url": "http://example.org"}),
        ("post", "/webhooks", 429): lambda: with_limits(hooked, max_webhooks=0),
        ("post", "/webhooks", 507): lambda: without_room(hooked),
        ("get", "/webhooks", 200): lambda: client.get("/webhooks"),
        ("get", "/webhooks/{webhook_id}", 200): lambda: client.get(hooked().headers["Location"]),
        ("get", "/webhooks/{webhook_id}", 404): lambda: client.get("/webhooks/x"),
        ("post", f"{webhook}/test", 202): lambda: client.post(f"{hooked().headers['Location']}/test"),
        ("post", f"{webhook}/test", 404): lambda: client.post("/webhooks/x/test"),
        ("post", f"{webhook}/test", 507): lambda: without_room(
            lambda path=hooked().headers["Location"]: client.post(f"{path}/test")
        ),
        ("delete", "/webhooks/{webhook_id}", 204): lambda: client.delete(hooked().headers["Location"]),
        ("delete", "/webhooks/{webhook_id}", 404): lambda: client.delete("/webhooks/hook_" + "0" * 26),
        ("post", link, 201): linked,
        ("post", link, 400): lambda: client.post(f"{UNKNOWN}/link", content=b"{", headers=json_type),
        ("post", link, 404): lambda: client.post(f"{UNKNOWN}/link", json={}),
        ("post", link, 409): lambda: client.post(f"{jobs.queued}/link", json={}),
        ("post", link, 413): lambda: client.post(f"{UNKNOWN}/link", content=b" " * 5000, headers=json_type),
        ("post", link, 415): lambda: client.post(f"{UNKNOWN}/link", content=b"{}", headers=text_type),
        ("post", link, 422): lambda: client.post(f"{UNKNOWN}/link", json={"with_files": 1}),
        ("get", link, 200): lambda: client.get(str(linked().request.url)),
        ("get", link, 404): lambda: client.get(f"{jobs.queued}/link"),
        ("delete", link, 204): lambda: client.delete(str(linked().request.url)),
        ("delete", link, 404): lambda: client.delete(f"{jobs.queued}/link"),
        ("get", "/healthz", 200): lambda: client.get("/healthz"),
        ("get", "/readyz", 200): lambda: client.get("/readyz"),
        ("get", "/metrics", 200): lambda: client.get("/metrics"),
        # Last, because nothing works afterwards.
        ("get", "/readyz", 503): without_schema,
    }


def test_every_documented_status_is_produced_with_its_schema(client, jobs, app, settings, monkeypatch):
    documented = {
        (method, path, int(status)): answer
        for path, item in app.openapi()["paths"].items()
        for method, operation in item.items()
        for status, answer in operation["responses"].items()
        # The statuses of access control are produced in its own tests.
        if status != "default" and (int(status) not in REFUSALS or (method, path, int(status)) in OTHER_REFUSALS)
    }
    produced = scenarios(client, jobs, app, settings, monkeypatch)
    assert set(produced) == set(documented)
    for (method, path, status), produce in produced.items():
        answer = produce()
        assert answer.status_code == status, (method, path, status, answer.text)
        media_type = answer.headers.get("Content-Type", "").partition(";")[0]
        assert not answer.content or media_type in documented[method, path, status]["content"], (method, path, status)


def test_every_operation_documents_its_errors(app):
    for path, item in app.openapi()["paths"].items():
        for method, operation in item.items():
            content = operation["responses"]["default"]["content"]
            assert set(content) == {"application/problem+json"}, (method, path)


def test_every_option_is_described_with_default_and_cost(client):
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    options = schemas["JobOptions"]
    for name, option in options["properties"].items():
        assert "default" in option or {"type": "null"} in option["anyOf"], name
        assert "default" in option["description"], name
        assert re.search(r"cost|free|time|twice|spare", option["description"], re.IGNORECASE), name


def test_every_member_of_every_schema_is_described(client):
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    undescribed = {
        (schema, member)
        for schema, content in schemas.items()
        for member, field in content.get("properties", {}).items()
        if not field.get("description")
    }
    assert {"CompressionRequest", "CompressionReport", "JobView"} <= set(schemas)
    assert undescribed == set()
