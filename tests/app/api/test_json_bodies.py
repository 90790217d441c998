"""JSON bodies that two parsers could understand differently."""

import json

import pytest
from fastapi.routing import iter_route_contexts

from app.api.json_bodies import JsonRoute, parse_json
from tests.app.api.conftest import BODY

JSON = {"Content-Type": "application/json"}
TWICE = [
    b'{"model_id": "local/tiny", "ratio": 0.1, "ratio": 0.3}',
    b'{"model_id": "local/tiny", "ratio": 0.3, "calibration": {"seed": 1, "seed": 1}}',
    b'{"model_id": "local/tiny", "rati\\u006f": 0.3, "ratio": 0.3}',
    b'{"model_id": "local/tiny", "ratio": 0.3, "metadata": {"a": "x", "a": "y"}}',
]


@pytest.mark.parametrize("path", ["/jobs", "/estimates", "/profiles", "/profiles/prof_{}/allocations"])
@pytest.mark.parametrize("body", TWICE)
def test_duplicate_names_are_refused(client, path, body):
    answer = client.post(path.format("0" * 26), content=body, headers=JSON)
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")
    assert "two members with the same name" in answer.json()["detail"]
    assert client.get("/jobs").json()["data"] == []


@pytest.mark.parametrize(
    "body",
    [b"{", b"\xff", json.dumps(BODY).encode("utf-16"), json.dumps(BODY).encode("utf-32-le"), b"[" * 4000],
)
def test_invalid_utf_8_json_is_a_bad_request(client, body):
    answer = client.post("/jobs", content=body, headers=JSON)
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")


def test_other_charsets_than_utf_8_are_refused(client):
    for charset, status in (("utf-8", 202), ("punycode", 415), ("utf-16", 415)):
        headers = {"Content-Type": f"application/json; charset={charset}"}
        assert client.post("/jobs", content=json.dumps(BODY), headers=headers).status_code == status


def test_names_must_be_unique_only_within_one_object():
    assert parse_json(b'[{"a": {"a": 1}}, {"a": [{"a": 2}]}]') == [{"a": {"a": 1}}, {"a": [{"a": 2}]}]


def test_every_endpoint_with_a_json_body_parses_it_strictly(app):
    with_body = [
        route.original_route
        for route in iter_route_contexts(app.routes)
        if getattr(route.original_route, "body_field", None) is not None
    ]
    assert len(with_body) >= 4
    assert all(isinstance(route, JsonRoute) for route in with_body)
