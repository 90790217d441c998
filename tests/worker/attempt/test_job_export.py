"""Jobs that write the result of an earlier job in another format."""

import os
import threading

import pytest

from app.shared.models import Job
from app.shared.repositories import jobs, outputs
from app.shared.requests import ExportRequest, JobRequest
from rocket_core.exports.conversion import export_artifact
from rocket_core.report.schema import CompressionReport
from tests.sampling import sweep
from tests.worker.threads import ThreadedAttempt as Attempt
from worker.runner import Runner

REQUEST = {
    "calibration": {"samples": 8, "sequence_length": 16},
    "options": {"preset": "paper", "ignore": ["*.mlp.*", "*.k_proj", "*.v_proj", "*.o_proj"]},
}
EXPORT = "dense"


@pytest.fixture
def attempt(settings, database, claim, look):
    def attempt(job_id, stop=None):
        Attempt(settings, database, claim(job_id), stop or threading.Event()).run(os.getppid())
        return look(job_id)

    return attempt


@pytest.fixture
def export(database):
    """Submit a job that exports the result of another one, as the API does."""

    def export(job_id, to=EXPORT):
        with database.transaction() as session:
            source = JobRequest.model_validate(jobs.get_job(session, job_id).request)
            request = ExportRequest(to=to).job_request(job_id, source, None)
            return jobs.create_job(session, request, max_attempts=5).job.id

    return export


@pytest.fixture
def finished(submit, attempt, model):
    """Return a job whose result can be written in other formats."""
    job_id = submit(**REQUEST)
    assert attempt(job_id).status == "succeeded"
    return job_id


def report_of(database, job):
    with database.snapshot() as session:
        return CompressionReport.model_validate(outputs.find_report(session, job).body)


@pytest.fixture
def expected(finished, published, tmp_path):
    """Return the files that the library exports from the same artifact."""
    for name, content in published(finished).items():
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_bytes(content)
    export_artifact(tmp_path / "source" / "rocket", tmp_path / EXPORT, EXPORT)
    return {f"{EXPORT}/{file.name}": file.read_bytes() for file in (tmp_path / EXPORT).iterdir()}


def test_a_result_is_written_in_another_format(finished, export, attempt, database, published, work, expected):
    job = attempt(export(finished))
    assert (job.status, job.error, job.progress) == ("succeeded", None, 1.0)
    found = published(job.id)
    assert {name for name in found if "/" not in name} == {"report.html", "report.json"}
    assert {name: text for name, text in found.items() if "/" in name} == expected
    report = report_of(database, job)
    assert [(made.kind, made.stored_bytes) for made in report.exports] == [(EXPORT, job.result["stored_bytes"])]
    assert job.result["stored_bytes"] > report_of(database, _job(database, finished)).totals.stored_bytes
    assert list(work.iterdir()) == []


def test_it_does_not_need_the_original(finished, export, attempt, settings, submit):
    job_id = export(finished)
    (settings.models_folder / "tiny").rename(settings.models_folder / "gone")
    assert attempt(job_id).status == "succeeded"


def test_a_format_that_cannot_hold_it_ends_with_the_reason(finished, export, attempt):
    job = attempt(export(finished, to="gguf"))
    assert (job.status, job.error["code"]) == ("failed", "unsupported_export")
    assert job.error["message"].startswith("the earlier result/rocket cannot be written exactly as gguf: ")


@pytest.mark.parametrize("moment", sweep(["pipeline.later_export.write_report"], soak=["exports.conversion._describe"]))
def test_killed_at_any_moment_it_ends_with_the_same_files(
    settings, finished, export, attempt, database, program, look, published, expected, moment
):
    """The process is killed before the export is complete, or after it, before the report is written."""
    killed = export(finished)
    module, _, name = moment.rpartition(".")
    mortal = program(f"""
    import rocket_core.{module} as module
    from tests.worker import threads
    from worker.attempt import job
    module.{name} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(job.main(sys.argv[1:], launch=lambda program, *_: threads.ChildThread(program, lambda: False)))
    """)
    assert Runner(settings, database, mortal).run()
    assert look(killed).status == "queued"
    job = attempt(killed)
    assert (job.status, job.attempt) == ("succeeded", 2)
    assert {name: text for name, text in published(killed).items() if "/" in name} == expected


def test_a_cancelled_export_is_retried(finished, export, attempt, cancel, retry):
    job_id = export(finished)
    cancel(job_id)
    assert attempt(retry(job_id)).status == "succeeded"


def _job(database, job_id) -> Job:
    with database.snapshot() as session:
        return jobs.get_job(session, job_id)
