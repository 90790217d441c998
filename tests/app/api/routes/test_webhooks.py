import pytest

from app.shared.encryption import decrypt
from app.shared.models import Webhook, WebhookDelivery
from app.shared.outcomes import JobError
from tests.app.api.conftest import BODY

URL = "https://example.org/hook"


@pytest.fixture
def hook(client):
    return client.post("/webhooks", json={"url": URL}).json()


def queued(client, hook):
    return [(each["event"], each["attempts"]) for each in client.get(f"/webhooks/{hook['id']}").json()["deliveries"]]


def test_the_secret_is_shown_once_and_stored_encrypted(client, context):
    answer = client.post("/webhooks", json={"url": URL})
    created = answer.json()
    assert (answer.status_code, answer.headers["Location"]) == (201, f"/webhooks/{created['id']}")
    secret = created.pop("secret")
    assert secret.startswith("whsec_")
    assert created["events"] == ["job.succeeded", "job.failed", "job.cancelled"]
    assert client.get("/webhooks").json()["data"] == [created]
    assert client.get(f"/webhooks/{created['id']}").json() == created | {"deliveries": []}
    with context.database.snapshot() as session:
        stored = session.get_one(Webhook, created["id"]).secret
    assert secret not in stored
    assert decrypt(context.settings, stored).get_secret_value() == secret


def test_every_end_of_a_job_is_reported_once(client, worker, hook):
    submitted = [client.post("/jobs", json=BODY | {"metadata": {"n": str(n)}}).json()["id"] for n in range(4)]
    succeeded, failed, cancelled, running = submitted
    worker.succeed(succeeded, {"report.json": b"{}"})
    worker.fail(failed, JobError(code="x", message="m"))
    client.post(f"/jobs/{cancelled}/cancel")
    client.post(f"/jobs/{cancelled}/cancel")
    worker.claim(running)
    client.post(f"/jobs/{running}/cancel")
    assert sorted(queued(client, hook)) == [("job.cancelled", 0), ("job.failed", 0), ("job.succeeded", 0)]


def test_a_report_says_how_the_job_ended(client, worker, context, hook):
    job_id = client.post("/jobs", json=BODY | {"metadata": {"team": "a"}}).json()["id"]
    worker.fail(job_id, JobError(code="x", message="m"))
    with context.database.snapshot() as session:
        (row,) = session.query(WebhookDelivery).all()
    assert row.body["type"] == "job.failed"
    data = row.body["data"]
    assert (data["id"], data["status"], data["model_id"], data["metadata"]) == (
        job_id,
        "failed",
        "local/tiny",
        {"team": "a"},
    )
    assert (data["error"]["code"], data["result"]) == ("x", None)


def test_only_the_chosen_events_are_reported(client, worker):
    hook = client.post("/webhooks", json={"url": URL, "events": ["job.failed"]}).json()
    client.post(f"/jobs/{client.post('/jobs', json=BODY).json()['id']}/cancel")
    assert queued(client, hook) == []


def test_a_deleted_webhook_has_no_deliveries(client, context, hook):
    client.post(f"/jobs/{client.post('/jobs', json=BODY).json()['id']}/cancel")
    assert client.delete(f"/webhooks/{hook['id']}").status_code == 204
    assert client.get(f"/webhooks/{hook['id']}").status_code == 404
    assert client.delete(f"/webhooks/{hook['id']}").json()["code"] == "webhook_not_found"
    with context.database.snapshot() as session:
        assert session.query(WebhookDelivery).all() == []


@pytest.mark.parametrize(
    "body",
    [
        *({"url": url} for url in ("http://example.org/", "https://10.0.0.1/", "https://[::1]/", "", "x" * 3000)),
        *({"url": URL, "events": events} for events in ([], ["job.started"], ["job.failed"] * 4)),
        {"url": URL, "secret": "mine"},
        {},
    ],
)
def test_other_webhooks_are_refused(client, body):
    assert client.post("/webhooks", json=body).status_code == 422
    assert client.get("/webhooks").json()["data"] == []


def test_the_number_of_webhooks_is_limited(client, settings):
    codes = [client.post("/webhooks", json={"url": URL}).status_code for _ in range(settings.max_webhooks + 1)]
    assert codes == [201] * settings.max_webhooks + [429]


def test_a_test_delivery_is_queued_once_at_a_time(client, hook):
    answers = [client.post(f"/webhooks/{hook['id']}/test") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 202]
    assert answers[0].json() == answers[1].json()
    assert queued(client, hook) == [("webhook.test", 0)]
