"""The form for a new job: whether token embedding and head may be quantized."""

import pytest

from tests.app.pages.test_new_job import FIELDS

SIZE = FIELDS | {"target": "size", "size": "90kB"}


@pytest.mark.parametrize(("choice", "included"), [("", None), ("embeddings", ["embeddings"]), ("none", [])])
def test_the_form_says_whether_tables_are_included(page, client, choice, included):
    answer = page("POST", "/ui/new", data=SIZE | {"include": choice})
    assert answer.status_code == 303
    [job] = client.get("/jobs").json()["data"]
    assert job["options"]["include"] == included
    # The link that repeats the job has the same choice.
    assert f"include={choice}&" in page("GET", answer.headers["Location"]).text.replace("&amp;", "&")


def test_a_prefilled_choice_is_selected(page):
    assert '<option value="none" selected>' in page("GET", "/ui/new?include=none").text


def test_including_tables_in_parameters_is_refused(page, client):
    answer = page("POST", "/ui/new", data=FIELDS | {"include": "embeddings"})
    assert answer.status_code == 422
    assert "needs kind quantized and budget bytes" in answer.text
    assert client.get("/jobs").json()["data"] == []
