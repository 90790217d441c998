import json
import threading

import pytest

from app.shared.repositories import jobs, outputs, works
from tests.app.api.routes.test_evaluations import REPORT
from tests.worker.waiting import eventually

FILES = {"rocket/model.safetensors": b"1"}


@pytest.fixture
def evaluate_soon(service):
    """Do in a thread what a worker does with the first evaluation of a job."""
    threads = []

    def work(source):
        def first():
            found = service.do(
                lambda session: works.list_work(session, jobs.get_job(session, source), "evaluation", limit=1)
            )
            return found[0].job.id if found else None

        lease = service.claim(eventually(first))
        service.do(works.save_report, lease, REPORT)
        service.do(outputs.succeed_without_files, lease)

    def evaluate_soon(source):
        threads.append(threading.Thread(target=work, args=(source,)))
        threads[-1].start()

    yield evaluate_soon
    for thread in threads:
        thread.join()


def test_the_id_goes_to_stdout_and_the_next_step_to_stderr(remote, client, service):
    source = service.succeeded(FILES)
    outcome = remote("evaluate-job", source, "--prompt", "Hi", "--answer-tokens", "3", "--evaluate-samples", "2")

    job = client.evaluations(source)[0].job
    assert (outcome.code, outcome.out) == (0, f"{job.id}\n")
    assert f"`rocket watch {job.id}` shows its progress" in outcome.err
    assert (job.evaluate.prompts, job.evaluate.answer_tokens, job.evaluate.samples) == (("Hi",), 3, 2)
    assert "evaluation" in remote("jobs").out


def test_a_watched_evaluation_shows_both_answers(remote, service, evaluate_soon):
    source = service.succeeded(FILES)
    evaluate_soon(source)
    outcome = remote("evaluate-job", source, "--watch")

    assert outcome.code == 0
    for expected in ("perplexity", "Prompt: Hi", "▶ you", "▶ me", "0.2000 nats per token"):
        assert expected in outcome.out, expected
    as_json = json.loads(remote("evaluate-job", source, "--json").out)
    assert (as_json["kind"], as_json["source_job_id"]) == ("evaluation", source)


def test_a_job_without_a_result_cannot_be_evaluated(remote, service):
    outcome = remote("evaluate-job", service.submit())
    assert outcome.code == 8
    assert "the job is queued; only the result of a succeeded job can be used" in outcome.err
