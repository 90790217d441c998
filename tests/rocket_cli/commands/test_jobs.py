import json


def test_jobs_are_a_table_newest_first(remote, service):
    first, second, third = service.submit(), service.submit(ratio=0.25), service.submit()
    service.progress(service.claim(second), "calibrating", 0.426)
    service.fail(service.claim(first))

    lines = remote("jobs").out.splitlines()

    assert lines[0].split() == ["job", "status", "progress", "model", "target", "size", "quality", "age"]
    assert lines[1].split()[:5] == [third, "queued", "0%", "local/tiny", "30.0%"]
    assert lines[2].split()[:8] == [second, "running", *["profiling", "the", "layers", "42%"], "local/tiny", "25.0%"]
    assert lines[3].split()[:5] == [first, "failed", "corrupt_checkpoint", "local/tiny", "30.0%"]
    assert len({len(line) for line in lines}) == 1


def test_jobs_can_be_filtered_by_status(remote, service):
    waiting, failed = service.submit(), service.submit()
    service.fail(service.claim(failed))

    assert waiting not in remote("jobs", "--status", "failed").out
    assert failed in remote("jobs", "--status", "failed").out
    outcome = remote("jobs", "--status", "cancelled")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "rocket: no cancelled jobs\n")


def test_more_jobs_than_one_page_can_be_listed(remote, service):
    ids = [service.submit() for _ in range(103)]

    outcome = remote("jobs", "--limit", "101")
    assert [line.split()[0] for line in outcome.out.splitlines()[1:]] == ids[:1:-1]
    assert outcome.err == f"rocket: older ones: rocket jobs --after {ids[2]}\n"
    rest = remote("jobs", "--after", ids[2])
    assert [line.split()[0] for line in rest.out.splitlines()[1:]] == ids[1::-1]
    assert rest.err == ""


def test_a_misspelt_id_is_answered_with_an_example(remote):
    outcome = remote("jobs", "--after", "misspelt")

    assert outcome.code == 2
    assert "such as job_0123456789abcdefghjkmnpqrs" in outcome.err
    assert "^" not in outcome.err


def test_json_output_has_the_jobs(remote, client, service):
    service.submit()
    last = service.submit()

    listed = json.loads(remote("jobs", "--json", "--limit", "1").out)
    assert listed == {"data": [client.get_job(last).model_dump(mode="json")], "has_more": True}


def test_an_invalid_status_is_refused_with_the_valid_ones(remote):
    outcome = remote("jobs", "--status", "done")

    assert outcome.code == 2
    assert "'succeeded'" in outcome.err


def test_size_and_quality_are_listed(remote, service):
    job_id = service.succeeded({"rocket/model.safetensors": b"1"})
    line = remote("jobs").out.splitlines()[1]
    assert line.split()[:2] == [job_id, "succeeded"]
    assert line.rstrip().endswith(" 7 bytes 10 → 10.2 predicted  0s")
