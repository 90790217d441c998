"""Random histories of several jobs, by the API and workers, compared with a second model of the life cycle."""

import itertools
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import settings as profile_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import delete, select

from app.shared.database import Database
from app.shared.errors import FencedOutError
from app.shared.lifecycle import Status
from app.shared.models import AuditEvent, Base
from app.shared.outcomes import JobError
from app.shared.repositories import leases, outputs, sweeps
from tests.app.api.conftest import BODY
from tests.reference.life_cycle import ACCEPTED, CONFLICT, HELD, OK, TERMINAL, UNPROCESSABLE, Lives
from tests.sampling import examples

pytestmark = pytest.mark.databases("sqlite", "postgres")


MAX_ATTEMPTS, LEASE, BACKOFF, NOTIFY, HOUR, DAY = 2, 60, 10, 30, 3600, 86400
RETENTION = timedelta(days=7)
# The second spells out the defaults of the first.
SAME = (BODY | {"metadata": {"team": "a"}}, BODY | {"metadata": {"team": "a"}, "calibration": {"seed": 0}})
OTHER = BODY | {"ratio": 0.4, "metadata": {"team": "b"}}
BODIES = (*SAME, OTHER)
STAGES = ("calibrating", "factorizing")
LAYERS = ("b", "a")
MOST_JOBS = 6


def asked(body):
    """Return which of the two requests a body stands for."""
    return "other" if body is OTHER else "same"


class LifeCycle(RuleBasedStateMachine):
    """Clients, workers and the passing of time; `client`, `worker` and `clock` come from the test."""

    @initialize()
    def begin(self):
        self.lives = Lives(
            max_attempts=MAX_ATTEMPTS, lease=LEASE, backoff=BACKOFF, key_lifetime=24 * HOUR, retention=7 * DAY
        )
        self.began = self.clock.seconds
        self.workers, self.mailbox, self.notified = [], [], {}
        self.endings, self.told = {}, {}
        self.names = itertools.count()
        self.database = self.worker.context.database
        with self.database.transaction() as session:
            for table in reversed(Base.metadata.sorted_tables):
                # The audit log takes no deletions.
                if table.name != AuditEvent.__tablename__:
                    session.execute(delete(table))
        # A history may lack the rules that create and claim jobs.
        for body, key in zip(BODIES, ("k1", "k2", None), strict=True):
            self.submit_one(body, key)
        self.notify(arrive=True)
        self.poll()

    # Clients.

    @precondition(lambda self: len(self.lives.jobs) < MOST_JOBS)
    @rule(body=st.sampled_from(BODIES), key=st.sampled_from([None, "k1", "k1", "k2"]))
    def submit(self, body, key):
        self.submit_one(body, key)

    @precondition(lambda self: self.lives.jobs)
    @rule(data=st.data())
    def cancel(self, data):
        job_id = self.any_job(data)
        self.steer(job_id, self.client.post(f"/jobs/{job_id}/cancel"), self.lives.cancel(job_id))

    @precondition(lambda self: self.lives.jobs)
    @rule(data=st.data())
    def delete(self, data):
        job_id = self.any_job(data)
        self.steer(job_id, self.client.delete(f"/jobs/{job_id}"), self.lives.delete(job_id))

    @precondition(lambda self: 0 < len(self.lives.jobs) < MOST_JOBS)
    @rule(data=st.data())
    def retry(self, data):
        self.pass_time(1)
        job_id = self.any_job(data)
        answer = self.client.post(f"/jobs/{job_id}/retry")
        status, retried = self.lives.retry(job_id, answer.json().get("id"))
        assert (answer.status_code, answer.json().get("id")) == (status, retried)

    @rule(
        status=st.sampled_from([None, None, *Status]),
        team=st.sampled_from([None, "a", "b", "c"]),
        limit=st.integers(1, 3),
    )
    def page_through_the_list(self, status, team, limit):
        wanted = [
            job_id
            for job_id, job in reversed(self.lives.jobs.items())
            if status in {None, job.status} and team in {None, {"same": "a", "other": "b"}[job.request]}
        ]
        params = {"limit": limit} | ({"status": status} if status else {}) | ({"metadata[team]": team} if team else {})
        found, page = [], {"has_more": True}
        while page["has_more"]:
            page = self.client.get("/jobs", params=params).json()
            assert len(page["data"]) <= limit
            found += [job["id"] for job in page["data"]]
            params["after"] = page["last_id"]
        assert found == wanted

    @precondition(lambda self: self.lives.jobs)
    @rule(data=st.data(), limit=st.integers(1, 3))
    def page_through_events(self, data, limit):
        job_id = self.any_job(data)
        found, page, after = [], {"has_more": True}, 0
        while page["has_more"]:
            page = self.client.get(f"/jobs/{job_id}/events", params={"after": after, "limit": limit}).json()
            found, after = found + page["data"], page["last_id"]
        assert [event["id"] for event in found] == list(range(1, len(self.lives.jobs[job_id].events) + 1))

    # Workers.

    @rule()
    def poll(self):
        with self.database.transaction() as session:
            lease = leases.claim_next(session, worker="w", lease_seconds=LEASE)
        waiting = self.lives.waiting()
        assert (lease and lease.job_id) == (waiting[0] if waiting else None)
        self.note_claim(lease)

    @precondition(lambda self: self.mailbox)
    @rule(data=st.data())
    def deliver_message(self, data):
        """Deliver a message, which may arrive again at any time, as messages are repeated and never removed."""
        job_id = data.draw(st.sampled_from(self.mailbox))
        for _ in range(2):
            is_waiting = job_id in self.lives.waiting()
            with self.unchanged(unless=is_waiting), self.database.transaction() as session:
                lease = leases.claim_job(session, job_id, worker="w", lease_seconds=LEASE)
            assert (lease is not None) == is_waiting
            self.note_claim(lease)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def keep_alive(self, data):
        for _ in range(2):
            self.write(data, self.lives.beat, leases.heartbeat, lease_seconds=LEASE)
            self.pass_time(LEASE - 20)
            self.reclaim(everything=False)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), stage=st.sampled_from(STAGES), progress=st.sampled_from([0.1, 0.5, 0.9]))
    def report_progress(self, data, stage, progress):
        def told(job):
            return self.lives.report_progress(job, stage, progress)

        self.write(data, told, outputs.report_progress, stage=stage, progress=progress)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), position=st.sampled_from(range(len(LAYERS))))
    def profile(self, data, position):
        layer = LAYERS[position]
        row = self.worker.profile(layer)
        self.write(
            data, lambda job: self.lives.profile(job, layer), outputs.save_layer_profile, position=position, profile=row
        )

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def allocate(self, data):
        chosen = [(layer, self.worker.factored) for layer in LAYERS]
        self.write(data, self.lives.allocate, outputs.save_allocation, chosen=chosen)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def release(self, data):
        self.write(data, self.lives.release, leases.release_job)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), retryable=st.booleans())
    def fail(self, data, retryable):
        error = JobError(code="x", message="m", retryable=retryable)

        def told(job):
            return self.lives.fail(job, "x", retryable=retryable)

        self.write(data, told, leases.fail_job, error=error, backoff_seconds=BACKOFF)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def succeed(self, data):
        files = {"model.safetensors": f"weights {next(self.names)}".encode(), "report.json": b"{}"}
        artifacts = self.worker.store(files)
        status = self.write(
            data,
            lambda job: self.lives.succeed(job, files),
            outputs.succeed_job,
            result=self.worker.result,
            report=self.worker.report,
            artifacts=artifacts,
            retention=RETENTION,
        )
        if status != "succeeded":
            for artifact in artifacts:
                self.worker.context.artifacts.remove(artifact.storage_key)

    # Time.

    @rule(seconds=st.sampled_from([1, BACKOFF, BACKOFF, NOTIFY + 1, LEASE + 1, LEASE + 1, 25 * HOUR]))
    def pass_time(self, seconds):
        self.clock.advance(seconds)
        self.lives.now += seconds

    @rule(everything=st.sampled_from([False, False, True]))
    def reclaim(self, everything):
        taken = self.worker.do(sweeps.reclaim_claimed if everything else sweeps.reclaim_expired)
        assert sorted(taken) == sorted(self.lives.reclaim(everything=everything))

    @rule(arrive=st.booleans())
    def notify(self, arrive):
        self.worker.do(sweeps.renotify, notify_seconds=NOTIFY)
        sent = self.worker.do(sweeps.list_notifications)
        self.worker.do(sweeps.delete_notifications, sent)
        self.notified |= {notification.job_id: self.lives.now for notification in sent}
        told = self.lives.tell({notification.job_id for notification in sent})
        assert told == [], "jobs were put into the queue without a word"
        if arrive:
            self.mailbox += [notification.job_id for notification in sent]
        # Nobody waits for longer than that without the workers being told.
        assert [
            job_id for job_id in self.lives.waiting() if self.lives.now - self.notified.get(job_id, -NOTIFY) >= NOTIFY
        ] == []

    @rule(days=st.sampled_from([0, 8]))
    def clean(self, days):
        self.pass_time(days * DAY)
        self.worker.do(sweeps.forget_idempotency_keys)
        self.worker.do(sweeps.forget_checkpoints, retention=RETENTION)
        self.lives.forget_checkpoints()
        for key in self.worker.do(sweeps.expire_artifacts):
            self.worker.context.artifacts.remove(key)
        for job in self.lives.jobs.values():
            if job.files and job.files_until <= self.lives.now:
                job.files = dict.fromkeys(job.files)

    # Invariants.

    @invariant()
    def api_matches_model(self):
        if not hasattr(self, "lives"):
            return
        listed = self.client.get("/jobs", params={"limit": 100}).json()["data"]
        assert [view["id"] for view in listed] == list(reversed(self.lives.jobs))
        for view in listed:
            self.compare(view, self.lives.jobs[view["id"]])
        for job_id in self.lives.deleted[-1:]:
            assert self.client.get(f"/jobs/{job_id}").status_code == 404

    def compare(self, view, job):
        told = {name: view[name] for name in ("status", "stage", "progress", "attempt", "retry_of")}
        assert told == {name: getattr(job, name) for name in told}
        assert view["attempt"] <= MAX_ATTEMPTS
        assert (view["error"] and view["error"]["code"]) == job.error
        assert (view["result"] is not None) == (job.status == "succeeded")
        assert (view["started_at"] is not None) == job.has_started
        assert (view["finished_at"] is not None) == (job.status in TERMINAL)
        if job.status in TERMINAL:
            # It never changes again, except that the job it repeats may be deleted.
            ending = self.endings.setdefault(view["id"], view)
            assert view == ending | {"retry_of": job.retry_of}
        if self.told.get(view["id"]) != job.events:
            self.told[view["id"]] = list(job.events)
            self.compare_parts(f"/jobs/{view['id']}", view, job)

    def compare_parts(self, path, view, job):
        assert self.client.get(path).json() == view
        events = self.client.get(f"{path}/events", params={"limit": 1000}).json()["data"]
        assert [event["id"] for event in events] == list(range(1, len(job.events) + 1))
        assert [(event["type"], named(event)) for event in events] == job.events
        layers = self.client.get(f"{path}/layers").json()["data"]
        assert [layer["name"] for layer in layers] == [layer for layer in LAYERS if layer in job.layers]
        assert all((layer["chosen"] is not None) == job.is_allocated for layer in layers)
        assert self.client.get(f"{path}/report").status_code == (OK if job.status == "succeeded" else CONFLICT)
        artifacts = self.client.get(f"{path}/artifacts").json()["data"]
        assert [artifact["name"] for artifact in artifacts] == sorted(job.files)
        for name, content in job.files.items():
            assert self.client.get(f"{path}/artifacts/{name}").content == content

    def teardown(self):
        if not hasattr(self, "lives"):
            return
        for job_id, job in self.lives.jobs.items():
            for name, content in job.files.items():
                answer = self.client.get(f"/jobs/{job_id}/artifacts/{name}")
                assert (answer.status_code, answer.content) == (OK, content) if content else answer.status_code == 410
        for job_id, part in itertools.product(self.lives.deleted, ("events", "layers", "report", "artifacts")):
            assert self.client.get(f"/jobs/{job_id}/{part}").status_code == 404

    # Helpers.

    def submit_one(self, body, key):
        self.pass_time(1)
        answer = self.client.post("/jobs", json=body, headers={"Idempotency-Key": key} if key else {})
        status, job_id = self.lives.submit(answer.json().get("id"), asked(body), key)
        assert (answer.status_code, answer.json().get("id")) == (status, job_id)
        assert answer.headers.get("Idempotent-Replayed") == ("true" if status == OK else None)
        assert status != UNPROCESSABLE or answer.json()["code"] == "idempotency_key_reused"

    def any_job(self, data):
        return data.draw(st.sampled_from(list(self.lives.jobs)))

    def steer(self, job_id, answer, status):
        assert answer.status_code == status, answer.text
        if status in {OK, ACCEPTED}:
            assert answer.json()["status"] == self.lives.jobs[job_id].status

    def note_claim(self, lease):
        if lease is not None:
            assert self.lives.claim(lease.job_id, lease)
            self.workers.append(lease)

    def write(self, data, told, function, **options):
        """Write under any lease that ever existed: it succeeds if its worker holds the job, else it has no effect."""
        holding = [lease for lease in self.workers if self.lives.held_by(lease)]
        if not holding and data.draw(st.booleans()):
            self.poll()
            holding = self.workers[-1:]
        lease = data.draw(st.sampled_from(holding if holding and data.draw(st.booleans()) else self.workers))
        job = self.lives.held_by(lease)
        with self.unchanged(unless=job is not None):
            try:
                answer = self.worker.do(function, lease=lease, **options)
            except FencedOutError:
                assert job is None or job.status not in HELD
                return None
        assert job is not None, f"{function.__name__} under a lease that is over"
        expected = told(job)
        assert answer == expected
        return answer

    @contextmanager
    def unchanged(self, *, unless):
        before = None if unless else self.rows()
        yield
        assert unless or self.rows() == before

    def rows(self):
        with self.database.snapshot() as session:
            return {table.name: session.execute(select(table)).all() for table in Base.metadata.sorted_tables}


def named(event):
    """Return the part of an event that identifies it among its kind."""
    data = event["data"]
    named_by = {"status": "status", "stage": "stage", "layer": "layer", "error": "code"}
    return (
        data[named_by[event["type"]]]
        if event["type"] in named_by
        else {"lease_lost": event["level"]}.get(event["type"], event["message"])
    )


@pytest.fixture
def settings(settings):
    """Yield a service without the limits that so many requests would hit."""
    return settings.model_copy(
        update={"max_attempts": MAX_ATTEMPTS, "rate_limit": "1000000/second", "submit_rate_limit": "1000000/second"}
    )


@pytest.fixture
def machine(app, context, client, worker, clock):
    database = Database(context.settings.database, clock=clock)
    app.state.context = worker.context = replace(context, database=database)
    yield type("Machine", (LifeCycle,), {"client": client, "worker": worker, "clock": clock})
    database.close()


def test_any_history_of_jobs_follows_the_life_cycle(machine):
    chosen = profile_settings(
        # 5 by default; `pytest --hypothesis-profile soak` runs more.
        max_examples=examples(50) // 10,
        stateful_step_count=40,
        deadline=None,
        # Shrinking a history takes minutes and hardly shortens it.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    run_state_machine_as_test(machine, settings=chosen)
