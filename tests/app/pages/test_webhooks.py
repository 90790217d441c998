"""The page of a tenant's webhooks."""

import re

import pytest

EVENTS = {f"job.{end}": "yes" for end in ("succeeded", "failed", "cancelled")}
URL = "https://example.org/<hook>"


@pytest.fixture
def hook(page, client):
    made = page("POST", "/ui/webhooks", data={"url": URL, **EVENTS})
    (found,) = client.get("/webhooks").json()["data"]
    return made, found


def test_a_webhook_is_created_and_its_secret_shown_once(page, hook):
    made, found = hook
    secret = re.search(r"whsec_[A-Za-z0-9+/=]+", made.text)[0]
    assert (found["url"], found["events"]) == (URL, [*EVENTS])
    later = page("GET", "/ui/webhooks").text
    assert secret not in later
    assert "https://example.org/&lt;hook&gt;" in later


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"url": "http://10.0.0.1/", **EVENTS}, "on the public internet"),
        ({"url": "", **EVENTS}, "Write the address"),
        ({"url": URL}, "choose at least one event"),
    ],
)
def test_what_is_refused_is_said_on_the_page(page, client, fields, problem):
    answer = page("POST", "/ui/webhooks", data=fields)
    assert answer.status_code == 422
    assert problem in answer.text
    assert client.get("/webhooks").json()["data"] == []


def test_a_test_message_is_shown_until_it_is_sent(page, hook):
    _, found = hook
    path = f"/ui/webhooks/{found['id']}"
    assert page("POST", f"{path}/test").headers["Location"] == f"/ui/webhooks#{found['id']}"
    shown = page("GET", f"{path}/deliveries").text
    assert "waiting for a worker" in shown
    assert "hx-get" in shown


def test_a_webhook_is_deleted(page, client, hook):
    assert page("POST", f"/ui/webhooks/{hook[1]['id']}/delete").status_code == 303
    assert client.get("/webhooks").json()["data"] == []
