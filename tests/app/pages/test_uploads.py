"""Uploads from the pages: the same endpoints, with a session and its token."""

import pytest

from app.shared.repositories import keys
from tests.app.pages.test_sign_in import csrf_of
from tests.reference.model_uploads import upload
from tests.reference.safetensors_files import save_llama

TEXT = {"Content-Type": "text/plain"}


@pytest.fixture
def token(page, context):
    """Sign in, and return the token of the session's forms."""
    with context.database.transaction() as session:
        key = keys.create_key(session, "alice").text
    page("POST", "/ui/sign-in", data={"key": key})
    return csrf_of(page("GET", "/ui/new").text)


def test_a_session_uploads_only_with_its_token(client, token):
    body = {"name": "mine", "files": [{"path": "config.json", "size": 2}, {"path": "model.safetensors", "size": 2}]}
    span = {"Content-Range": "bytes 0-1/2"}
    for headers, expected in (({}, 403), ({"X-CSRF-Token": "guessed"}, 403), ({"X-CSRF-Token": token}, 201)):
        assert client.post("/ui/calibrations", content=b"text", headers=TEXT | headers).status_code == expected
        assert client.post("/ui/models", json=body, headers=headers).status_code == expected
    sent = client.put("/ui/models/mine/files/config.json", content=b"{}", headers=span)
    assert sent.status_code == 403
    # Elsewhere, the cookie alone does not give access.
    assert client.post("/calibrations", content=b"text", headers=TEXT | {"X-CSRF-Token": token}).status_code == 401


def test_pieces_may_be_as_large_as_elsewhere(client, settings):
    body = {"name": "mine", "files": [{"path": "config.json", "size": 2}, {"path": "tokenizer.json", "size": 10**5}]}
    body["files"].append({"path": "model.safetensors", "size": 2})
    assert client.post("/ui/models", json=body).status_code == 201
    assert settings.max_body_bytes < 10**5
    span = {"Content-Range": f"bytes 0-{10**5 - 1}/{10**5}"}
    assert client.put("/ui/models/mine/files/tokenizer.json", content=bytes(10**5), headers=span).status_code == 200


def test_uploads_are_offered_by_the_names_of_their_files(page, client, tmp_path, settings):
    client.post("/calibrations?name=my <notes>.txt", content=b"text", headers=TEXT)
    client.post("/calibrations", content=b"other", headers=TEXT)
    upload(client, save_llama(tmp_path / "sent"))
    (settings.models_folder / "quantized").mkdir()
    (settings.models_folder / "quantized" / "model.gguf").touch()
    text = page("GET", "/ui/new").text
    assert "my &lt;notes&gt;.txt (your upload)" in text
    assert '<option value="upload/mine">' in text
    assert "<code>local/quantized</code>: it holds GGUF files" in text
    assert [name["name"] for name in client.get("/calibrations").json()["data"] if name["size"]] == [
        "my <notes>.txt",
        None,
    ]


@pytest.mark.parametrize("name", ["a\nb", "a\0b", "", "a" * 256])
def test_names_that_cannot_be_shown_are_refused(client, name):
    answer = client.post("/calibrations", params={"name": name}, content=b"text", headers=TEXT)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
