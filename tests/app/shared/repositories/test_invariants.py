"""Random histories of a job, and invariants of every history."""

from datetime import timedelta

import pytest
from hypothesis import HealthCheck, Phase, settings
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
from app.shared.errors import ConflictError, FencedOutError
from app.shared.lifecycle import Status
from app.shared.models import Job, JobEvent
from app.shared.outcomes import JobError
from app.shared.repositories import jobs, leases, outputs, sweeps
from app.shared.requests import JobRequest

pytestmark = pytest.mark.databases("sqlite", "postgres")

MAX_ATTEMPTS = 3
LEASE_SECONDS = 60


@pytest.fixture
def machine(database_url, clock, report, result, artifact, profile):
    class History(RuleBasedStateMachine):
        @initialize()
        def begin(self):
            self.database = Database(database_url, clock=clock)
            with self.database.transaction() as session:
                # Everything else is deleted with it.
                session.execute(delete(Job))
                request = JobRequest(model_id="local/tiny", ratio=0.3)
                self.job_id = jobs.create_job(session, request, max_attempts=MAX_ATTEMPTS).job.id
            self.leases = []
            self.crashes = 0
            self.terminal = None

        def act(self, function, **options):
            with self.database.transaction() as session:
                return function(session, **options)

        def write(self, lease, function, **options):
            """Write under a lease; only the newest may succeed, and only while the job is held."""
            current = self.job.fence
            try:
                answer = self.act(function, lease=lease, **options)
            except FencedOutError:
                assert lease.fence != current
                return None
            assert lease.fence == current
            return answer

        @property
        def job(self):
            with self.database.snapshot() as session:
                return jobs.get_job(session, self.job_id)

        @rule(by_poll=st.booleans())
        def claim(self, by_poll):
            options = {"worker": "w", "lease_seconds": LEASE_SECONDS}
            before = self.job.status
            lease = (
                self.act(leases.claim_next, **options)
                if by_poll
                else self.act(leases.claim_job, job_id=self.job_id, **options)
            )
            if lease is not None:
                assert before == "queued"
                self.leases.append(lease)

        @precondition(lambda self: self.leases)
        @rule(data=st.data(), retryable=st.booleans())
        def fail(self, data, retryable):
            error = JobError(code="x", message="m", retryable=retryable)
            self.write(data.draw(st.sampled_from(self.leases)), leases.fail_job, error=error)

        @precondition(lambda self: self.leases)
        @rule(data=st.data())
        def release(self, data):
            self.write(data.draw(st.sampled_from(self.leases)), leases.release_job)

        @precondition(lambda self: self.leases)
        @rule(data=st.data())
        def beat(self, data):
            self.write(data.draw(st.sampled_from(self.leases)), leases.heartbeat, lease_seconds=LEASE_SECONDS)

        @precondition(lambda self: self.leases)
        @rule(data=st.data(), name=st.sampled_from(["l0", "l1"]))
        def publish(self, data, name):
            lease = data.draw(st.sampled_from(self.leases))
            self.write(lease, outputs.save_layer_profile, position=0, profile=profile(name))

        @precondition(lambda self: self.leases)
        @rule(data=st.data())
        def succeed(self, data):
            self.write(
                data.draw(st.sampled_from(self.leases)),
                outputs.succeed_job,
                result=result,
                report=report,
                artifacts=[artifact],
                retention=timedelta(days=1),
            )

        @rule()
        def cancel(self):
            before = self.job.status
            try:
                self.act(jobs.cancel_job, job_id=self.job_id)
            except ConflictError:
                assert before in {"succeeded", "failed"}

        @rule(seconds=st.sampled_from([1, 30, 61]))
        def wait(self, seconds):
            clock.advance(seconds)

        @rule(everything=st.booleans())
        def sweep(self, everything):
            self.act(sweeps.reclaim_claimed if everything else sweeps.reclaim_expired)

        @invariant()
        def promises_hold(self):
            job = self.job
            assert self.terminal in {None, job.status}
            if Status(job.status).is_terminal:
                self.terminal = job.status
                assert job.finished_at is not None
            assert 0 <= job.attempt <= MAX_ATTEMPTS
            assert (job.result is not None) == (job.status == "succeeded")
            assert (job.error is not None) == (job.status == "failed")
            with self.database.snapshot() as session:
                events = session.scalars(select(JobEvent).order_by(JobEvent.sequence)).all()
                published = len(outputs.list_artifacts(session, job))
            assert [event.sequence for event in events] == list(range(1, job.last_event + 1))
            assert published == (job.status == "succeeded")
            told = [event.data["status"] for event in events if event.type == "status"]
            assert told[-1] == job.status
            layers = [event.message for event in events if event.type == "layer"]
            assert len(set(layers)) == len(layers)

        def teardown(self):
            if hasattr(self, "database"):
                self.database.close()

    return History


def test_no_history_breaks_an_invariant(machine):
    quick = settings(
        max_examples=25,
        stateful_step_count=20,
        deadline=None,
        # Shrinking a history takes minutes and hardly shortens it.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    run_state_machine_as_test(machine, settings=quick)
