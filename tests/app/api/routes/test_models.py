import base64
import hashlib
import json
from datetime import timedelta
from urllib.parse import quote

import pytest

from app.shared.models import UploadedModel
from app.shared.repositories import models
from tests.app.api.conftest import BODY
from tests.reference.hostile_files import HEADERS
from tests.reference.model_uploads import announce, head_of, put, send_heads, send_rest, upload
from tests.reference.safetensors_files import save_llama

FILES = [{"path": "config.json", "size": 2}, {"path": "model.safetensors", "size": 10_000}]


@pytest.fixture
def folder(tmp_path):
    return save_llama(tmp_path / "sent")


@pytest.fixture
def weights(folder):
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture
def judged(client, folder):
    """Announce a model, and have its headers accepted."""
    announce(client, folder)
    send_heads(client, folder)
    assert client.post("/models/mine/check").json()["status"] == "weights"


def kept(settings):
    return sorted(path.name for path in (settings.data_dir / "artifacts").iterdir())


def test_an_uploaded_model_is_offered_and_takes_a_job(client, folder, weights):
    view = upload(client, folder)
    assert (view["id"], view["status"]) == ("upload/mine", "ready")
    assert view["received"] == view["size"] == sum(file.stat().st_size for file in folder.iterdir())
    assert {"id": "upload/mine", "problem": None} in client.get("/models").json()["data"]
    job = client.post("/jobs", json=BODY | {"model_id": "upload/mine"})
    assert (job.status_code, job.json()["model_id"]) == (202, "upload/mine")
    estimate = client.post("/estimates", json=BODY | {"model_id": "upload/mine"}).json()
    local = client.post("/estimates", json=BODY).json()
    # A worker puts its files together on its disk.
    assert estimate["disk_bytes"] == local["disk_bytes"] + local["stored_bytes"]
    same = {name: estimate[name] for name in ("available", "disk_bytes")}
    assert estimate == local | {"model_id": "upload/mine"} | same


def test_sizes_that_add_up_to_too_much_are_refused(client):
    large = [{"path": f"model-{n}.safetensors", "size": 2**62} for n in range(2)]
    answer = client.post("/models", json={"name": "mine", "files": [FILES[0], *large]})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert "in total" in answer.json()["detail"]


def test_pieces_are_what_was_sent(client, folder, weights, settings):
    upload(client, folder)
    file = client.get("/models/mine/files/model.safetensors").json()
    pieces = file.pop("pieces")
    assert file == {"path": "model.safetensors", "size": len(weights), "received": len(weights)}
    sizes = [piece["size"] for piece in pieces]
    assert sizes == [len(head_of(weights)), 2**16, len(weights) - len(head_of(weights)) - 2**16]
    start = len(head_of(weights))
    assert pieces[1]["sha256"] == hashlib.sha256(weights[start : start + 2**16]).hexdigest()
    content = [(settings.data_dir / "artifacts" / name).read_bytes() for name in kept(settings)]
    assert sum(map(len, content)) == sum(file.stat().st_size for file in folder.iterdir())


def test_an_interrupted_upload_is_announced_again_and_continues(client, judged, folder, weights):
    start = len(head_of(weights))
    stop = start + 2**16
    put(client, "mine", "model.safetensors", weights[start:stop], start=start, total=len(weights))
    again = announce(client, folder)
    assert again.status_code == 200
    received = {file["path"]: file["received"] for file in again.json()["files"]}
    assert received == {
        "config.json": (folder / "config.json").stat().st_size,
        "model.safetensors": stop,
        "tokenizer.json": 2,
    }
    rest = put(client, "mine", "model.safetensors", weights[stop:], start=stop, total=len(weights))
    assert rest.json()["received"] == len(weights)
    assert client.get("/models/mine").json()["status"] == "ready"


def test_a_repeated_piece_changes_nothing(client, judged, folder, weights, settings):
    send_rest(client, folder)
    before = kept(settings)
    answer = put(client, "mine", "config.json", (folder / "config.json").read_bytes())
    assert (answer.status_code, kept(settings)) == (200, before)
    other = put(client, "mine", "config.json", b"x" * (folder / "config.json").stat().st_size)
    assert (other.status_code, other.json()["code"]) == (409, "model_upload_conflict")
    assert kept(settings) == before


def test_weights_wait_until_the_headers_are_judged(client, folder, weights, settings):
    announce(client, folder)
    early = put(client, "mine", "model.safetensors", weights[:20_000], total=len(weights))
    assert (early.status_code, early.json()["code"]) == (409, "model_upload_conflict")
    assert "its header" in early.json()["detail"]
    assert kept(settings) == []
    unsent = client.post("/models/mine/check")
    assert (unsent.status_code, unsent.json()["code"]) == (409, "model_upload_conflict")
    assert "config.json" in unsent.json()["detail"]
    send_heads(client, folder)
    start = len(head_of(weights))
    late = put(client, "mine", "model.safetensors", weights[start : start + 10], start=start, total=len(weights))
    assert late.status_code == 409


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "already_quantized"),
        ([], "unsupported_architecture"),
    ],
)
def test_a_refused_model_is_deleted_before_its_weights_arrive(client, folder, settings, change, code):
    (folder / "config.json").write_text(json.dumps(change))
    announce(client, folder)
    send_heads(client, folder)
    answer = client.post("/models/mine/check")
    assert (answer.status_code, answer.json()["code"]) == (422, code)
    assert "upload/mine" in answer.json()["detail"]
    assert client.get("/models/mine").status_code == 404
    assert kept(settings) == list((settings.data_dir / "work").iterdir()) == []


def test_a_model_without_a_tokenizer_is_refused(client, folder):
    (folder / "tokenizer.json").unlink()
    announce(client, folder)
    send_heads(client, folder)
    assert "has no tokenizer" in client.post("/models/mine/check").json()["detail"]


@pytest.mark.parametrize("name", ["nine_dimensions", "empty_with_a_huge_dimension", "product_beyond_the_file"])
def test_hostile_headers_are_refused(client, folder, settings, name):
    content = HEADERS[name]()
    (folder / "model.safetensors").write_bytes(content)
    announce(client, folder)
    send_heads(client, folder)
    answer = client.post("/models/mine/check")
    assert answer.status_code == 422
    assert kept(settings) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"short", b"\xff" * 100, bytes(100), b"\x80" + bytes(7) + b"{}"],
    ids=("empty", "short", "huge", "zero", "long"),
)
def test_weights_that_are_no_safetensors_are_refused(client, folder, settings, content):
    (folder / "model.safetensors").write_bytes(content)
    announce(client, folder)
    if content:
        answer = put(client, "mine", "model.safetensors", content)
        assert (answer.status_code, answer.json()["code"]) == (422, "corrupt_checkpoint")
    assert kept(settings) == []


@pytest.mark.parametrize(
    ("path", "size"),
    [
        ("../config.json", 1),
        ("/etc/passwd", 1),
        ("a/b/config.json", 1),
        (".hidden.json", 1),
        ("tokenizer\n.json", 1),
        ("tokenizer\0.json", 1),
        ("1_Pooling/../config.json", 1),
        ("1_Pooling//config.json", 1),
        ("modeling_evil.py", 1),
        ("pytorch_model.bin", 1),
        ("model.gguf", 1),
        ("sub/model.safetensors", 1),
        ("tokenizer.json", 2**40),
        ("config.json", 2**30),
        ("adapter_config.json", 10),
        ("CONFIG.JSON", 2),
        ("tokenizer.json", -1),
    ],
)
def test_files_that_are_no_part_of_a_model_are_refused(client, settings, path, size):
    files = [*([] if path == "config.json" else FILES[:1]), FILES[1], {"path": path, "size": size}]
    answer = client.post("/models", json={"name": "mine", "files": files})
    assert answer.status_code == 422
    assert client.get("/models/mine").status_code == 404


@pytest.mark.parametrize("files", [FILES[:1], FILES[1:], [], FILES + FILES, FILES[:1] * 1001])
def test_files_that_are_no_model_are_refused(client, files):
    assert client.post("/models", json={"name": "mine", "files": files}).status_code in {413, 422}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a--b", "-a", "a.git", "a" * 97, "a b", "a\0", "ü"])
def test_names_that_are_no_names_are_refused(client, name):
    assert client.post("/models", json={"name": name, "files": FILES}).status_code == 422
    assert client.get(f"/models/{quote(name, safe='') or '%20'}").status_code in {200, 404}
    assert client.get("/models").json()["data"] == [{"id": "local/tiny", "problem": None}]


@pytest.mark.parametrize(
    ("span", "content"),
    [
        ("", b"{}"),
        ("bytes */2", b"{}"),
        ("bytes 0-1/3", b"{}"),
        ("bytes 1-0/2", b"{}"),
        ("bytes 0-2/2", b"{}}"),
        ("bytes 0-1/2", b"{"),
        ("bytes 0-1/2", b"{}}"),
        ("bytes 0-1/2", b""),
        ("bytes 0-99999999999999999999/2", b"{}"),
        ("bytes -1-1/2", b"{}"),
    ],
)
def test_other_bytes_than_announced_are_refused(client, settings, span, content):
    client.post("/models", json={"name": "mine", "files": FILES})
    answer = client.put("/models/mine/files/config.json", content=content, headers={"Content-Range": span})
    assert (answer.status_code, answer.json()["code"]) in {(422, "invalid_request"), (422, "over_quota")}
    assert kept(settings) == []


def test_bytes_that_leave_a_gap_are_refused(client, judged, weights):
    answer = put(client, "mine", "model.safetensors", weights[-10:], start=len(weights) - 10, total=len(weights))
    assert (answer.status_code, answer.json()["code"]) == (409, "model_upload_conflict")
    assert f"continues at byte {len(head_of(weights))}" in answer.json()["detail"]


def test_a_wrong_digest_is_refused(client, settings):
    client.post("/models", json={"name": "mine", "files": FILES})
    right, wrong = (
        f"sha-256=:{base64.b64encode(hashlib.sha256(content).digest()).decode()}:" for content in (b"{}", b"[]")
    )
    for digest in (wrong, "md5=:abc:", "sha-256=:abc:"):
        refused = put(client, "mine", "config.json", b"{}", **{"Content-Digest": digest})
        assert (refused.status_code, kept(settings)) == (422, [])
    assert put(client, "mine", "config.json", b"{}", **{"Content-Digest": right}).status_code == 200


def test_a_piece_has_its_own_size_limit(client, settings, folder):
    most = settings.max_upload_bytes
    files = [FILES[0], {"path": "model.safetensors", "size": 10 * most}]
    client.post("/models", json={"name": "mine", "files": files})
    answer = put(client, "mine", "model.safetensors", bytes(most + 1), total=10 * most)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    # Whatever the headers say, no more is read.
    long = client.put(
        "/models/mine/files/config.json",
        content=iter([bytes(most), b"more"]),
        headers={"Content-Range": "bytes 0-1/2"},
    )
    assert (long.status_code, long.json()["code"]) == (413, "body_too_large")
    assert client.get("/models/mine").json()["piece_bytes"] == most


def test_a_small_piece_must_end_a_file_or_its_header(client, folder, weights, settings):
    announce(client, folder)
    start = len(head_of(weights))
    for begin, stop, total in ((0, 8, len(weights)), (0, start - 1, len(weights))):
        answer = put(client, "mine", "model.safetensors", weights[begin:stop], start=begin, total=total)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
        assert "at least 65536 bytes" in answer.json()["detail"]
    assert put(client, "mine", "config.json", b"{", total=(folder / "config.json").stat().st_size).status_code == 422
    assert kept(settings) == []
    send_heads(client, folder)
    client.post("/models/mine/check")
    for size in (1, 2**16 - 1):
        part = weights[start : start + size]
        assert put(client, "mine", "model.safetensors", part, start=start, total=len(weights)).status_code == 422
    send_rest(client, folder)
    assert client.get("/models/mine").json()["status"] == "ready"


@pytest.mark.parametrize("limit", ["MAX_PIECES", "MAX_MODEL_PIECES"])
def test_a_model_has_a_limited_number_of_pieces(client, judged, folder, weights, monkeypatch, limit):
    # The judged model has three: two small files, and a header.
    monkeypatch.setattr(models, limit, {"MAX_PIECES": 2, "MAX_MODEL_PIECES": 4}[limit])
    start, total = len(head_of(weights)), len(weights)
    assert put(client, "mine", "model.safetensors", weights[start : start + 2**16], start=start, total=total).is_success
    answer = put(client, "mine", "model.safetensors", weights[start + 2**16 :], start=start + 2**16, total=total)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert "send larger pieces" in answer.json()["detail"]


def test_the_view_of_a_model_has_no_list_of_pieces(client, judged, folder, weights):
    before = len(client.get("/models/mine").content)
    start = len(head_of(weights))
    put(client, "mine", "model.safetensors", weights[start : start + 2**16], start=start, total=len(weights))
    assert len(client.get("/models/mine").content) < before + 20
    assert client.get("/models/mine/files/none.json").status_code == 404


def test_another_model_of_that_name_is_refused(client, folder):
    upload(client, folder)
    answer = client.post("/models", json={"name": "mine", "files": FILES})
    assert (answer.status_code, answer.json()["code"]) == (409, "model_upload_conflict")


def test_an_incomplete_model_takes_no_job(client, judged):
    answer = client.post("/jobs", json=BODY | {"model_id": "upload/mine"})
    assert (answer.status_code, answer.json()["code"]) == (409, "model_not_ready")
    listed = {model["id"]: model["problem"] for model in client.get("/models").json()["data"]}
    assert "rocket upload" in listed["upload/mine"]


@pytest.mark.parametrize("name", ["nothing", "..", "mine/../mine"])
def test_models_that_do_not_exist_take_no_job(client, name):
    answer = client.post("/jobs", json=BODY | {"model_id": f"upload/{name}"})
    assert answer.status_code in {404, 422}


def test_a_model_is_deleted_with_its_files_unless_a_job_needs_it(client, folder, settings):
    upload(client, folder)
    job = client.post("/jobs", json=BODY | {"model_id": "upload/mine"}).json()
    busy = client.delete("/models/mine")
    assert (busy.status_code, busy.json()["code"]) == (409, "job_state_conflict")
    client.post(f"/jobs/{job['id']}/cancel")
    assert client.delete("/models/mine").status_code == 204
    assert client.get("/models/mine").status_code == client.delete("/models/mine").status_code == 404
    assert kept(settings) == []
    assert client.post(f"/jobs/{job['id']}/retry").status_code == 404


@pytest.mark.parametrize(
    ("limits", "status"),
    [
        ({"max_models": 0}, 429),
        ({"max_stored_bytes": 10_000}, 422),
        ({"max_stored_bytes": 10_002}, 201),
        ({"max_model_bytes": 9_999}, 422),
        ({"max_model_bytes": 10_000}, 201),
    ],
)
def test_quotas_count_what_is_announced(client, context, settings, monkeypatch, limits, status):
    object.__setattr__(context, "settings", settings.model_copy(update=limits))
    assert client.post("/models", json={"name": "mine", "files": FILES}).status_code == status
    if "max_stored_bytes" in limits and status == 201:
        assert client.post("/models", json={"name": "another", "files": FILES}).status_code == 429
        client.delete("/models/mine")
        assert client.post("/models", json={"name": "another", "files": FILES}).status_code == 201


def test_abandoned_and_unused_models_are_swept(client, folder, database, context):
    upload(client, folder, "ready")
    upload(client, folder, "needed")
    client.post("/jobs", json=BODY | {"model_id": "upload/needed"})
    announce(client, folder, "begun")
    with context.database.transaction() as session:
        for model in session.query(UploadedModel):
            model.used_at -= timedelta(hours=2)

    def sweep(retention):
        with context.database.transaction() as session:
            models.delete_old(session, unfinished=timedelta(hours=1), retention=retention)
        return [model["id"] for model in client.get("/models").json()["data"] if model["id"].startswith("upload/")]

    assert sweep(timedelta(hours=3)) == ["upload/needed", "upload/ready"]
    assert sweep(None) == ["upload/needed", "upload/ready"]
    assert sweep(timedelta(hours=1)) == ["upload/needed"]


def test_folders_that_are_no_models_say_what_they_are(client, settings):
    (settings.models_folder / "quantized").mkdir()
    (settings.models_folder / "quantized" / "model.gguf").touch()
    save_llama(settings.models_folder / "adapter")
    (settings.models_folder / "adapter" / "adapter_config.json").touch()
    listed = {model["id"]: model["problem"] for model in client.get("/models").json()["data"]}
    assert listed["local/tiny"] is None
    assert "GGUF" in listed["local/quantized"]
    assert "merge_and_unload()" in listed["local/adapter"]
    refused = client.post("/jobs", json=BODY | {"model_id": "local/quantized"})
    assert (refused.status_code, "GGUF" in refused.json()["detail"]) == (422, True)
