"""The pages of profiles, and what pages show of one that no longer exists."""

import pytest

from app.services import profiles
from app.shared.repositories import outputs
from tests.app.api.conftest import BODY


@pytest.fixture
def profiled(client, worker):
    """Return a job that has only profiled a model, and its profile."""
    job_id = client.post("/profiles", json={"model_id": BODY["model_id"]}).json()["id"]
    lease = worker.claim(job_id)
    profile_id = worker.save_profile(lease)
    worker.do(outputs.succeed_without_files, lease)
    return job_id, profile_id


@pytest.fixture
def gone(client, profiled):
    """Return the same after the profile is deleted."""
    assert client.delete(f"/profiles/{profiled[1]}").status_code == 204
    return profiled


def test_an_uploaded_text_has_the_name_of_its_file(page, client, worker):
    named = {"params": {"name": "my story.txt"}, "headers": {"Content-Type": "text/plain"}}
    upload = client.post("/calibrations", content=b"a text", **named).json()
    calibration = {"dataset": upload["id"], "samples": 8}
    job_id = client.post("/jobs", json=BODY | {"calibration": calibration}).json()["id"]
    profile_id = worker.profile_model(job_id)
    for address in ("/ui/profiles", f"/ui/profiles/{profile_id}", f"/ui/jobs/{job_id}"):
        assert "8 samples of my story.txt" in page("GET", address).text, address


def test_a_job_links_its_profile(page, profiled):
    job_id, profile_id = profiled
    text = page("GET", f"/ui/jobs/{job_id}").text
    assert f"/ui/profiles/{profile_id}" in text
    assert "no longer exists" not in text


def test_a_job_with_a_deleted_profile_has_no_dead_link(page, gone):
    job_id, profile_id = gone
    answer = page("GET", f"/ui/jobs/{job_id}")
    assert answer.status_code == 200
    assert "profile that this job created no longer exists" in answer.text
    for address in ("/", f"/ui/jobs/{job_id}", f"/ui/jobs/{job_id}/log", "/ui/profiles", "/ui/compare"):
        assert profile_id not in page("GET", address).text, address


def test_a_job_with_a_deleted_profile_shows_its_own_results(page, client, worker):
    job_id = client.post("/jobs", json=BODY).json()["id"]
    profile_id = worker.profile_model(job_id)
    assert "Other ratios" in page("GET", f"/ui/jobs/{job_id}").text
    client.delete(f"/profiles/{profile_id}")
    answer = page("GET", f"/ui/jobs/{job_id}")
    assert answer.status_code == 200
    assert "Other ratios" not in answer.text
    assert "/profiles/prof_" not in answer.text


@pytest.mark.parametrize("part", ["", "/what-if?ratio=0.3", "/figures/size-frontier.csv"])
def test_the_page_of_a_deleted_profile_says_what_to_do(page, gone, part):
    answer = page("GET", f"/ui/profiles/{gone[1]}{part}")
    assert (answer.status_code, answer.headers["Content-Type"]) == (404, "text/html; charset=utf-8")
    assert "no profile has this id" in answer.text
    assert "recreates it" in answer.text
    assert 'href="/ui/profiles"' in answer.text


def test_an_open_page_reloads_after_its_profile_is_deleted(page, gone):
    htmx = {"HX-Request": "true"}
    answer = page("GET", f"/ui/profiles/{gone[1]}/what-if?ratio=0.3", headers=htmx)
    # The page reloads and then shows the error.
    assert (answer.status_code, answer.headers.get("HX-Refresh")) == (404, "true")
    assert "HX-Refresh" not in page("GET", f"/ui/profiles/{gone[1]}").headers
    # A form does not reload, because its input would be lost.
    assert "HX-Refresh" not in page("POST", f"/ui/profiles/{gone[1]}/delete", headers=htmx).headers


def test_a_profile_deleted_during_a_preview_is_omitted(page, client, profiled, monkeypatch):
    found = profiles.find_profile_for

    def find_and_lose(*arguments):
        profile = found(*arguments)
        client.delete(f"/profiles/{profile.id}")
        return profile

    monkeypatch.setattr(profiles, "find_profile_for", find_and_lose)
    fields = {"model_id": "local/tiny", "dataset": "builtin", "samples": "256", "preset": "fast", "ratio": "0.3"}
    fields |= {"target": "ratio", "export": "both"}
    answer = page("POST", "/ui/new/preview", data=fields)
    assert answer.status_code == 200
    assert "unknown until the layers are profiled" in answer.text


def test_the_list_states_how_long_profiles_are_kept(page, app):
    assert "The 100 most recently used profiles are stored." in page("GET", "/ui/profiles").text
    app.state.context.settings.__dict__.update(max_profiles=7, profile_retention_days=2.5)
    text = page("GET", "/ui/profiles").text
    assert "The 7 most recently used profiles are stored, each for up to 2.5 days after a job last used it." in text
