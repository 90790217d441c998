"""`rocket admin` on the database of a running service."""

import json

import httpx2
import pytest

from app.shared.database import downgrade
from app.shared.models import Job, JobEvent
from app.shared.outcomes import JobError
from app.shared.repositories import leases
from rocket_client import Rocket
from rocket_client.errors import ProblemError


@pytest.fixture
def admin(rocket, service, monkeypatch):
    monkeypatch.setenv("ROCKET_DATA_DIR", str(service.settings.data_dir))
    return lambda *arguments: rocket("admin", *arguments)


def as_json(outcome):
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def test_a_key_is_shown_once_and_gives_access(admin, server):
    made = admin("keys", "create", "alice", "--label", "laptop")
    assert made.code == 0
    assert "alice is a new tenant" in made.err
    key = made.out.strip()
    with Rocket(server.url, api_key=key, patience=0) as alice:
        assert alice.submit("local/tiny", ratio=0.3).status == "queued"
    with Rocket(server.url, patience=0) as nobody, pytest.raises(ProblemError) as refused:
        nobody.models()
    assert (refused.value.status, refused.value.code) == (401, "unauthenticated")
    listed = admin("keys", "list")
    secret = key.rsplit("_", 1)[1]
    assert "laptop" in listed.out
    assert secret not in listed.out + admin("keys", "list", "--json").out + made.err


def test_a_key_has_the_requested_properties(admin):
    made = as_json(
        admin("keys", "create", "prometheus", "--scope", "metrics", "--scope", "read", "--expires-days", "1", "--json")
    )
    assert made["key"].startswith(f"rk_{made['id']}_")
    assert (made["tenant"], made["scopes"], made["last_used_at"]) == ("prometheus", "read metrics", None)
    assert made["expires_at"] > made["created_at"]
    [listed] = as_json(admin("keys", "list", "prometheus", "--json"))["data"]
    assert listed == {name: value for name, value in made.items() if name != "key"}
    assert as_json(admin("keys", "list", "nobody", "--json")) == {"data": []}


def test_a_revoked_key_is_refused_from_then_on(admin, server):
    key = admin("keys", "create", "alice").out.strip()
    admin("keys", "create", "bob")
    key_id = key.split("_")[1]
    with Rocket(server.url, api_key=key, patience=0) as alice:
        alice.models()
        outcome = admin("keys", "revoke", key_id)
        assert (outcome.code, f"key {key_id} of alice is revoked" in outcome.err) == (0, True)
        assert "no usable key is left" not in outcome.err
        with pytest.raises(ProblemError):
            alice.models()


def test_revoking_the_last_key_warns(admin):
    key_id = as_json(admin("keys", "create", "alice", "--json"))["id"]
    assert "no usable key is left" in admin("keys", "revoke", key_id).err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("keys", "create", "No Name"), 2),
        (("keys", "create", "alice", "--scope", "admin"), 2),
        (("keys", "create", "alice", "--expires-days", "-1"), 2),
        (("keys", "revoke", "0" * 16), 7),
        (("quota", "set", "nobody", "--active-jobs", "1"), 7),
        (("quota", "set", "alice", "--active-jobs", "many"), 2),
        (("quota", "set", "alice", "--active-jobs", "-1"), 2),
        (("quota", "set", "alice", "--active-jobs", "2147483648"), 2),
        (("requeue", "job_" + "0" * 26), 7),
    ],
)
def test_invalid_arguments_are_refused(admin, arguments, code):
    outcome = admin(*arguments)
    assert (outcome.code, outcome.out) == (code, "")
    assert "Traceback" not in outcome.err


def test_quotas_can_be_set_and_reset_one_by_one(admin):
    admin("keys", "create", "alice")
    first = admin("quota", "set", "alice", "--active-jobs", "3", "--stored-bytes", "0")
    assert first.code == 0
    admin("quota", "set", "alice", "--model-bytes", "5000000000", "--stored-bytes", "default")
    [alice] = as_json(admin("tenants", "--json"))["data"]
    assert alice == {
        "tenant": "alice",
        "active_jobs": 3,
        "stored_bytes": None,
        "model_bytes": 5_000_000_000,
        "calibration_tokens": None,
    }
    assert "alice" in admin("tenants").out


def test_a_requeued_job_leaves_its_worker_and_the_attempt_counts(admin, service):
    job_id = service.submit()
    lease = service.claim(job_id)
    outcome = admin("requeue", job_id)
    assert (outcome.code, outcome.err) == (0, f"rocket: {job_id} is queued\n")
    with service.database.snapshot() as session:
        job = session.get_one(Job, job_id)
        messages = [event.message for event in session.query(JobEvent).order_by(JobEvent.sequence)]
    assert (job.status, job.attempt, job.fence) == ("queued", 1, None)
    assert messages == ["queued", "running", "taken from its worker by the operator", "queued"]
    with pytest.raises(Exception, match="no longer belongs to this worker"):
        service.do(leases.heartbeat, lease, lease_seconds=60)
    assert service.claim(job_id) is not None


def test_requeueing_ends_exhausted_and_cancelling_jobs(admin, service, client):
    last = service.submit()
    for _ in range(2):
        service.do(leases.fail_job, service.claim(last), JobError(code="x", message="m", retryable=True))
    service.claim(last)
    assert json.loads(admin("requeue", last, "--json").out) == {"id": last, "status": "failed"}
    cancelled = service.submit()
    service.claim(cancelled)
    client.cancel(cancelled)
    assert json.loads(admin("requeue", cancelled, "--json").out)["status"] == "cancelled"


@pytest.mark.parametrize("status", ["queued", "failed"])
def test_only_a_claimed_job_can_be_requeued(admin, service, status):
    job_id = service.submit()
    if status == "failed":
        service.fail(service.claim(job_id))
    outcome = admin("requeue", job_id)
    assert outcome.code == 8
    assert ("rocket retry" in outcome.err) == (status == "failed")


def test_a_missing_database_is_not_created(rocket, tmp_path):
    outcome = rocket("admin", "keys", "create", "alice", "--data-dir", tmp_path / "typo")
    assert (outcome.code, outcome.out) == (2, "")
    assert "rocket migrate" in outcome.err
    assert not (tmp_path / "typo").exists()


def test_a_database_of_another_version_is_refused(admin, service):
    downgrade(service.settings.database, "0001")
    outcome = admin("keys", "create", "alice")
    assert (outcome.code, outcome.out) == (2, "")
    assert "rocket migrate" in outcome.err


def test_an_error_is_json_for_programs(admin):
    outcome = admin("keys", "revoke", "0" * 16, "--json")
    assert json.loads(outcome.out)["error"]["code"] == "not_found"


def test_a_service_without_keys_does_not_start_publicly(rocket, tmp_path):
    folder = tmp_path / "data"
    refused = rocket("serve", "--host", "0.0.0.0", "--port", "0", "--data-dir", folder)  # noqa: S104  # refused
    assert (refused.code, refused.out) == (2, "")
    command = f"rocket admin keys create TENANT --data-dir {folder}"
    assert f"`{command}`" in refused.err
    # The command works as printed, and afterwards the service may start.
    made = rocket(*command.replace("TENANT", "alice").split()[1:])
    assert made.code == 0
    assert made.out.startswith("rk_")
    from app.services.access import check_safe_binding
    from app.shared.settings import Settings

    check_safe_binding(Settings(data_dir=folder), "0.0.0.0")  # noqa: S104


def test_operator_actions_are_in_the_audit_log(admin):
    key_id = as_json(admin("keys", "create", "alice", "--label", "canary", "--json"))["id"]
    admin("quota", "set", "alice", "--active-jobs", "3")
    admin("keys", "revoke", key_id)
    newest_first = as_json(admin("audit", "--json"))["data"]
    assert [(event["action"], event["tenant"], event["subject"]) for event in newest_first] == [
        ("key.revoke", "alice", key_id),
        ("quota.set", "alice", None),
        ("key.create", "alice", key_id),
    ]
    assert {event["actor"] for event in newest_first} == {"admin"}
    assert newest_first[1]["detail"]["active_jobs"] == 3
    assert "canary" not in json.dumps(newest_first)


def test_the_audit_log_is_filtered_by_tenant_action_and_time(admin):
    for tenant in ("alice", "bob"):
        admin("keys", "create", tenant)
    asked = {
        ("--tenant", "bob"): ["bob"],
        ("--action", "key.create"): ["bob", "alice"],
        ("--action", "job.delete"): [],
        ("--since", "2020-01-01"): ["bob", "alice"],
        ("--since", "2120-01-01T00:00:00"): [],
        ("--limit", "1"): ["bob"],
    }
    for arguments, tenants in asked.items():
        found = as_json(admin("audit", *arguments, "--json"))["data"]
        assert [event["tenant"] for event in found] == tenants, arguments
    table = admin("audit").out
    assert "key.create" in table
    assert "scopes=read write" in table
    refused = admin("audit", "--action", "x")
    assert refused.code == 2
    assert "job.delete" in refused.err


def test_an_operator_can_list_and_revoke_sessions(admin, server):
    key = admin("keys", "create", "alice").out.strip()
    with httpx2.Client(base_url=server.url, trust_env=False) as browser:
        assert browser.post("/ui/sign-in", data={"key": key}).status_code == 303
        assert browser.get("/").status_code == 200
        [opened] = as_json(admin("sessions", "list", "--json"))["data"]
        assert (opened["tenant"], opened["key_id"]) == ("alice", key.split("_")[1])
        assert as_json(admin("sessions", "list", "bob", "--json"))["data"] == []
        ended = admin("sessions", "revoke", opened["id"])
        assert (ended.code, "alice has ended" in ended.err) == (0, True)
        assert browser.get("/", headers={"Accept": "text/html"}).status_code == 303
    again = admin("sessions", "revoke", opened["id"])
    assert (again.code, "sessions list" in again.err) == (7, True)
    assert as_json(admin("audit", "--limit", "1", "--json"))["data"][0]["action"] == "session.revoke"
