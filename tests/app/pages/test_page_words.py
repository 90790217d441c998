"""Messages of the API as pages show them."""

import pytest

from app.pages.page_words import page_words

UNKNOWN = "job_" + "0" * 26


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("no job has this id; GET /jobs lists yours", "no job has this id; the page Jobs lists yours"),
        ("GET /jobs/job_1/artifacts lists the files", "the job's page lists the files"),
        ("poll GET /jobs/{id}, or wait", "poll the job's page, or wait"),
        ("use `local/NAME` (see GET /models)", "use `local/NAME` (see the form of a new job)"),
        ("GET /models/NAME lists its files", "GET /models/NAME lists its files"),
        ("documented in GET /openapi.json", "documented in GET /openapi.json"),
        ("the disk is full", "the disk is full"),
    ],
)
def test_requests_are_named_as_pages(message, shown):
    assert page_words(message) == shown


def test_a_page_names_pages_and_the_api_names_requests(page, client):
    shown = page("GET", f"/ui/jobs/{UNKNOWN}", headers={"Accept": "text/html"}).text
    assert "the page Jobs lists yours" in shown
    assert "GET /" not in shown
    assert "GET /jobs lists yours" in client.get(f"/jobs/{UNKNOWN}").json()["detail"]


def test_a_form_names_pages_as_well(page):
    shown = page("POST", "/ui/new", data={"model_id": "local/gone", "ratio": "0.3"}).text
    assert "the form of a new job lists those it has" in shown
    assert "GET /" not in shown
