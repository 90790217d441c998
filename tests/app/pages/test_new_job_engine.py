"""The form for a new job: where the result will run."""

from tests.app.pages.test_new_job import FIELDS

BITS = FIELDS | {"target": "bits", "bits": "5"}


def test_the_form_says_where_the_result_will_run(page, client):
    answer = page("POST", "/ui/new", data=BITS | {"engine": "vllm"})
    # The tiny model of the server is stored in 32 bits.
    assert answer.status_code == 422
    assert "vLLM runs models in 16 bits" in answer.text
    assert '<option value="vllm" selected>vLLM</option>' in answer.text
    assert client.get("/jobs").json()["data"] == []


def test_the_default_is_this_library(page, client):
    answer = page("POST", "/ui/new", data=BITS)
    assert answer.status_code == 303
    [job] = client.get("/jobs").json()["data"]
    assert job["options"]["engine"] == "rocket"
    assert "engine=rocket&" in page("GET", answer.headers["Location"]).text.replace("&amp;", "&")


def test_a_target_may_bound_the_memory_as_well(page, client):
    answer = page("POST", "/ui/new", data=BITS | {"storage": "memory"})
    assert answer.status_code == 303
    [job] = client.get("/jobs").json()["data"]
    assert job["options"]["storage"] == "memory"
    assert "storage=memory&" in page("GET", answer.headers["Location"]).text.replace("&amp;", "&")


def test_an_unknown_engine_is_refused(page):
    answer = page("POST", "/ui/new", data=BITS | {"engine": "toaster"})
    assert answer.status_code == 422
    assert 'href="#engine"' in answer.text
