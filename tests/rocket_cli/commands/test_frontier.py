import json

import pytest

from app.shared.repositories import outputs, profiles
from rocket_client.errors import InvalidArgumentError, ProblemError


@pytest.fixture
def profiled(service):
    """Return a job that has profiled its layers, and the profile."""
    job_id = service.submit()
    return job_id, service.profile_model(service.claim(job_id))


def test_jobs_and_profiles_have_the_same_frontier(remote, profiled):
    drawn = [remote("frontier", name).out for name in profiled]

    assert drawn[0] == drawn[1]
    lines = drawn[0].splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [f"{step / 20:.2f}" for step in range(12)] + ["0.59"]
    dense, smallest = lines[1].split(), lines[-2].split()
    assert (dense[1:4], len(dense[4])) == (["612", "bytes", "100.0%"], 40)
    assert (smallest[1:4], len(smallest[4])) == (["340", "bytes", "55.6%"], 22)
    assert "relative errors of all outputs" in lines[-1]


def test_a_terminal_shows_a_curve_above_the_table(remote, profiled, monkeypatch):
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    both, alone = remote("frontier", profiled[0]).out, remote("frontier", profiled[0], "--table").out

    assert "(error)" in both
    assert "(error)" not in alone
    assert both.endswith(alone)
    monkeypatch.setenv("COLUMNS", "60")
    rows = [line for line in remote("frontier", profiled[0], "--table").out.splitlines() if "bytes" in line]
    assert len(rows) == 13
    assert max(map(len, rows)) <= 60
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[36m" not in remote("frontier", profiled[0]).out


def test_it_shows_a_matching_submit_command(remote, profiled):
    assert "rocket submit local/tiny --ratio R" in remote("frontier", profiled[0]).err


def test_json_output_has_every_point(remote, profiled):
    points = json.loads(remote("frontier", profiled[0], "--json").out)["data"]

    assert [point["ratio"] for point in points[:-1]] == [step / 100 for step in range(60)]
    assert points[0]["model_bytes"] == 612


def test_a_job_without_a_profile_says_so(remote, service):
    outcome = remote("frontier", service.submit())

    assert outcome.code == 2
    assert "is queued and has no profile" in outcome.err


def test_a_job_with_a_deleted_profile_shows_how_to_recreate_it(remote, service):
    lease = service.claim(service.submit(ratio=None))
    profile_id = service.profile_model(lease)
    service.do(outputs.succeed_without_files, lease)
    service.do(profiles.delete_profile, profile_id, "local")
    outcome = remote("frontier", lease.job_id)

    assert outcome.code == 2
    said = " ".join(outcome.err.split())
    assert "was deleted" in said
    assert "rocket profile local/tiny" in said


@pytest.mark.parametrize("name", ["job_" + "0" * 26, "prof_" + "0" * 26, "a/b"])
def test_unknown_names_are_refused(remote, name):
    outcome = remote("frontier", name)

    assert outcome.code != 0
    assert "Traceback" not in outcome.err


@pytest.mark.both_clients
def test_the_client_lists_and_queries_profiles(client, profiled):
    job_id, profile_id = profiled
    assert client.get_job(job_id).profile_id == profile_id
    page = client.list_profiles()
    assert ([profile.id for profile in page.data], page.has_more) == ([profile_id], False)
    assert client.get_profile(profile_id) == page.data[0]
    by_ratio, by_size, by_error = (
        client.allocate(profile_id, ratio=0.2),
        client.allocate(profile_id, model_bytes=400),
        client.allocate(profile_id, error=0),
    )
    assert [len(answer.layers) for answer in (by_ratio, by_size, by_error)] == [2, 2, 2]
    assert by_ratio.budget == "parameters"
    assert by_size.model_bytes <= 400
    assert by_error.ratio == 0
    with pytest.raises(ProblemError, match="out of reach"):
        client.allocate(profile_id, model_bytes=3)
    client.delete_profile(profile_id)
    with pytest.raises(ProblemError, match="no profile"):
        client.frontier(profile_id)


@pytest.mark.both_clients
@pytest.mark.parametrize("wanted", [{}, {"ratio": 0.1, "error": 1.0}, {"ratio": float("nan")}])
def test_an_invalid_question_is_refused_before_sending(client, wanted):
    with pytest.raises(InvalidArgumentError):
        client.allocate("prof_" + "0" * 26, **wanted)
