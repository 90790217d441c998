"""The page of the API."""

import re

from app.shared.repositories import keys


def test_every_operation_and_schema_is_shown(page, client):
    document = client.get("/openapi.json").json()
    text = page("GET", "/docs").text
    for path, item in document["paths"].items():
        for method in item:
            assert re.search(
                rf'<span class="badge {method}">{method.upper()}</span> <code>{re.escape(path)}</code>', text
            )
    for name in document["components"]["schemas"]:
        assert f'id="schema-{name}"' in text


def test_every_link_on_the_page_leads_somewhere(page):
    text = page("GET", "/docs").text
    anchors = set(re.findall(r'id="([^"]+)"', text))
    links = set(re.findall(r'href="#([^"]+)"', text))
    assert links <= anchors
    assert {"schema-Problem", "schema-JobView", "jobs"} <= links


def test_nothing_comes_from_other_servers(page):
    answer = page("GET", "/docs")
    assert re.findall(r'(?:src|href)="(?:https?:)?//', answer.text) == []
    assert "script-src 'self'" in answer.headers["Content-Security-Policy"]
    assert re.findall(r"<script(?! src=)", answer.text) == []


def test_with_keys_the_page_needs_a_session(page, context):
    with context.database.transaction() as session:
        keys.create_key(session, "alice")
    answer = page("GET", "/docs")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/ui/sign-in?next=%2Fdocs")
