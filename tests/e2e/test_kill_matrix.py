"""Processes killed at dangerous places: each process at least once, and around each commit.

One job is struck at all of them in turn, each time in the state left by the last attempt: as hard as a job for each,
with half as many process starts. `make soak` kills every process at every failpoint.
"""

import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.kill_matrix import (
    ATTEMPT_PROCESSES,
    POINTS,
    assert_promise,
    environment,
    run_to_end,
    save_model,
    submit,
    uninterrupted,
)
from tests.reference.fake_hub import FakeHub

# Between the others, the same process writes the same kind of state.
LEFT_TO_SOAK = {"after-row", "after-layer", "after-allocation", "mid-save"}
PLACES = [point for point in POINTS if point.name not in LEFT_TO_SOAK]
# Each failpoint after the claim costs an attempt, except the last, which strikes when the job has ended.
ATTEMPTS = 1 + sum(point.where in ATTEMPT_PROCESSES for point in PLACES) - 1


@pytest.fixture(scope="module")
def struck(tmp_path_factory, postgres, redis_server):
    """Return a deployment on Postgres and Redis, and a job that was struck at every one of them."""
    folder = tmp_path_factory.mktemp("kills")
    marks, data_dir = folder / "marks", folder / "data"
    (data_dir / "models").mkdir(parents=True)
    with FakeHub() as hub:
        hub.repositories["org/tiny"] = save_model(folder / "model")
        expected = uninterrupted(folder / "model", folder / "out")
        name = postgres.create(postgres.migrated)
        given = environment(marks, [point.point() for point in PLACES], hub.url, folder / "hub")
        urls = {"ROCKET_DATABASE_URL": postgres.url(name), "ROCKET_BROKER_URL": redis_server.url}
        service = Deployment(data_dir, **given, **urls)
        try:
            job_id = submit(service, marks)
            job = run_to_end(service, marks, job_id, seconds=600)
            yield service, job, marks, expected
        finally:
            service.close()
            postgres.drop(name)


@pytest.mark.parametrize("point", PLACES, ids=lambda point: point.name)
def test_a_job_survives_a_kill(struck, point):
    _, job, marks, _ = struck
    assert (marks / point.name).exists(), "nobody came there"
    assert job["status"] == "succeeded"


def test_after_all_kills_the_job_is_as_if_uninterrupted(struck):
    service, job, _, expected = struck
    assert job["attempt"] == ATTEMPTS
    assert_promise(service, job["id"], expected)
