import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from app.services import jobs as services
from app.services import quotas
from app.shared.errors import OverQuotaError, QuotaExceededError
from app.shared.models import Upload
from app.shared.outcomes import JobError
from app.shared.repositories import jobs, tenants
from app.shared.repositories.audit import LOCAL_ACTOR
from app.shared.repositories.tenants import Quotas
from app.shared.requests import CalibrationRequest, EvaluationRequest, JobRequest
from tests.app.api.conftest import BODY, Worker

pytestmark = pytest.mark.databases("sqlite", "postgres")


REQUEST = JobRequest(**BODY)
BROKEN = JobError(code="x", message="m")


@pytest.fixture
def worker(context, profile, factored, report, result):
    return Worker(context, profile, factored, report, result)


@pytest.fixture
def allow(context):
    """Set quotas of a tenant."""

    def allow(tenant="local", **chosen):
        with context.database.transaction() as session:
            tenants.ensure_tenant(session, tenant)
            tenants.set_quotas(session, tenant, **chosen)

    return allow


@pytest.fixture
def submit_job(context):
    return lambda owner="local", key=None: services.submit_job(context, LOCAL_ACTOR.on_behalf_of(owner), REQUEST, key)


def count(context, owner="local"):
    with context.database.snapshot() as session:
        return jobs.count_active_jobs(session, owner)


def test_a_job_without_calibration_takes_no_tokens(context, allow):
    allow("alice", calibration_tokens=1)
    request = JobRequest(model_id="local/tiny", bits=6, options={"preset": "instant"})
    assert request.datasets == ()
    with context.database.snapshot() as session:
        limits = quotas.find_limits(session, context.settings, "alice")
    context.admission.admit("alice", request, limits)
    with pytest.raises(OverQuotaError, match="calibration"):
        context.admission.admit("alice", JobRequest(model_id="local/tiny", bits=6), limits)


def test_settings_apply_where_a_tenant_has_no_quota(context, allow):
    allow("alice", stored_bytes=5, calibration_tokens=None)
    with context.database.snapshot() as session:
        own = quotas.find_limits(session, context.settings, "alice")
        default = quotas.find_limits(session, context.settings, "bob")
    assert default == Quotas(active_jobs=100, calibration_tokens=2**24)
    assert own == Quotas(active_jobs=100, calibration_tokens=2**24, stored_bytes=5)


def test_concurrent_submissions_cannot_exceed_the_job_quota(context, allow, submit_job, monkeypatch):
    allow(active_jobs=3)

    def slow_count(*arguments):
        found = jobs.count_active_jobs(*arguments)
        # Time for all others to count as well, if they could.
        time.sleep(0.03)
        return found

    monkeypatch.setattr(quotas, "count_active_jobs", slow_count)

    def attempt(_number):
        try:
            return submit_job().created
        except QuotaExceededError:
            return False

    with ThreadPoolExecutor(12) as pool:
        made = list(pool.map(attempt, range(12)))
    assert sum(made) == count(context) == 3
    assert submit_job("other").created


def test_a_refused_job_leaves_nothing_and_frees_its_key(context, allow, submit_job):
    allow(active_jobs=1)
    first = submit_job(key="a")
    with pytest.raises(QuotaExceededError):
        submit_job(key="b")
    assert submit_job(key="a").job.id == first.job.id, "a replay makes no job"
    services.cancel_job(context, LOCAL_ACTOR, first.job.id)
    assert submit_job(key="b").created


def test_a_retry_counts_as_a_job(context, allow, submit_job, worker):
    failed = submit_job().job.id
    worker.fail(failed, BROKEN)
    allow(active_jobs=1)
    other = submit_job().job.id
    with pytest.raises(QuotaExceededError):
        services.retry_job(context, LOCAL_ACTOR, failed)
    assert count(context) == 1
    services.cancel_job(context, LOCAL_ACTOR, other)
    retried = services.retry_job(context, LOCAL_ACTOR, failed)
    assert services.retry_job(context, LOCAL_ACTOR, failed).job.id == retried.job.id, "which makes no other"


def test_a_retry_is_judged_by_the_current_quotas(context, allow, submit_job, worker):
    failed = submit_job().job.id
    worker.fail(failed, BROKEN)
    allow(calibration_tokens=1)
    with pytest.raises(OverQuotaError):
        services.retry_job(context, LOCAL_ACTOR, failed)


def test_a_quota_of_zero_jobs_is_a_permanent_refusal(allow, submit_job):
    allow(active_jobs=0)
    with pytest.raises(OverQuotaError):
        submit_job()


def test_the_storage_quota_blocks_jobs_until_files_are_deleted(context, allow, submit_job, worker):
    allow(stored_bytes=10)
    done = submit_job().job.id
    worker.succeed(done, {"model.safetensors": b"0123456789"})
    with pytest.raises(QuotaExceededError, match="10 of 10 bytes"):
        submit_job()
    assert submit_job("other").created
    services.delete_job(context, LOCAL_ACTOR, done)
    assert submit_job().created


def test_expired_artifacts_do_not_count_as_stored(context, submit_job, worker):
    from app.shared.repositories import sweeps

    done = submit_job().job.id
    worker.succeed(done, {"model.safetensors": b"0123456789"}, retention=timedelta(0))
    with context.database.snapshot() as session:
        assert tenants.sum_stored_bytes(session, "local") == 10
    worker.do(sweeps.expire_artifacts)
    with context.database.snapshot() as session:
        assert tenants.sum_stored_bytes(session, "local") == 0


def test_uploads_count_as_stored(context):
    with context.database.transaction() as session:
        for owner in ("local", "other"):
            session.add(
                Upload(
                    owner=owner,
                    id="0" * 32,
                    storage_key=owner,
                    sha256="0" * 64,
                    size=6,
                    suffix=".txt",
                    documents=1,
                    created_at=tenants.now(session),
                )
            )
        session.flush()
        limits = Quotas(stored_bytes=10)
        quotas.check_room(session, limits, "local", size=4)
        with pytest.raises(QuotaExceededError):
            quotas.check_room(session, limits, "local", size=5)
        with pytest.raises(OverQuotaError):
            quotas.check_room(session, limits, "local", size=11)
        quotas.check_room(session, Quotas(), "local", size=2**60)


@pytest.mark.parametrize(("samples", "length", "fits"), [(2, 50, True), (2, 51, False), (1, None, False)])
def test_calibration_tokens_are_samples_times_length(samples, length, fits):
    asked = CalibrationRequest(samples=samples, sequence_length=length)
    if fits:
        quotas.check_calibration_tokens(Quotas(calibration_tokens=100), asked)
        return
    with pytest.raises(OverQuotaError) as refused:
        quotas.check_calibration_tokens(Quotas(calibration_tokens=100), asked)
    assert refused.value.param == "calibration.samples"


@pytest.mark.parametrize(("samples", "length", "fits"), [(2, 50, True), (2, 51, False), (1, None, False)])
def test_evaluation_tokens_have_their_own_limit(samples, length, fits):
    asked = EvaluationRequest(samples=samples, sequence_length=length)
    if fits:
        quotas.check_evaluation_tokens(Quotas(calibration_tokens=100), asked)
        return
    with pytest.raises(OverQuotaError) as refused:
        quotas.check_evaluation_tokens(Quotas(calibration_tokens=100), asked)
    assert refused.value.param == "evaluate.samples"
    quotas.check_evaluation_tokens(Quotas(calibration_tokens=None), asked)
    quotas.check_evaluation_tokens(Quotas(calibration_tokens=1), None)


def test_permanent_refusals_are_422_and_temporary_ones_429(client, allow):
    allow(active_jobs=1)
    assert client.post("/jobs", json=BODY).status_code == 202
    later = client.post("/jobs", json=BODY)
    assert (later.status_code, later.json()["code"]) == (429, "quota_exceeded")
    assert int(later.headers["Retry-After"]) > 0
    allow(active_jobs=None, calibration_tokens=1000)
    never = client.post("/jobs", json=BODY)
    assert (never.status_code, never.json()["code"]) == (422, "over_quota")
    assert never.json()["param"] == "calibration.samples"
    allow(calibration_tokens=None, model_bytes=10)
    assert client.post("/jobs", json=BODY).json()["param"] == "model_id"
