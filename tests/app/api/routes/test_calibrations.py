import hashlib
import json
import threading

import pytest

from app.services import uploads
from app.shared.outcomes import JobError
from app.shared.repositories import sweeps
from app.shared.repositories.audit import LOCAL_ACTOR
from rocket_core.calibration.datasets import documents
from tests.app.api.conftest import BODY

TEXT = {"Content-Type": "text/plain; charset=utf-8"}
LINES = {"Content-Type": "application/x-ndjson"}
GOOD = b'{"text": "one", "more": 1}\n\n{"text": "two"}'


def kept(settings):
    return [path.name for path in (settings.data_dir / "artifacts").iterdir()]


def upload(client, content=GOOD, headers=LINES):
    return client.post("/calibrations", content=content, headers=headers)


def test_an_upload_is_identified_by_its_content(client, settings):
    answer = upload(client)
    digest = hashlib.sha256(GOOD).hexdigest()
    view = answer.json()
    assert answer.status_code == 201
    assert answer.headers["Location"] == f"/calibrations/{digest[:32]}"
    assert (view["id"], view["size"], view["documents"], view["sha256"]) == (
        f"upload/{digest[:32]}",
        len(GOOD),
        2,
        digest,
    )
    (name,) = kept(settings)
    assert (settings.data_dir / "artifacts" / name).read_bytes() == GOOD
    again = upload(client)
    assert (again.status_code, again.json()) == (200, view)
    assert kept(settings) == [name]
    assert client.get(answer.headers["Location"]).json() == view
    assert view in client.get("/calibrations").json()["data"]


@pytest.mark.parametrize(
    ("content", "headers", "code"),
    [
        (b"", TEXT, "calibration_empty"),
        (b" \n \n", TEXT, "calibration_empty"),
        (b"\n\n", LINES, "calibration_empty"),
        (b"a\0b", TEXT, "calibration_failed"),
        (b"\xff\xfe", TEXT, "calibration_failed"),
        (b"fine\nCANARY\xc3", TEXT, "calibration_failed"),
        (b"CANARY", LINES, "calibration_failed"),
        (b'["CANARY"]', LINES, "calibration_failed"),
        (b'{"text": 1}', LINES, "calibration_failed"),
        (b'{"text": "a"}\n{"test": "CANARY"}', LINES, "calibration_failed"),
        (b'{"text": "\\ud800"}', LINES, "calibration_failed"),
        (b'{"text": "\\u0000"}', LINES, "calibration_failed"),
        (b"[" * 100_000, LINES, "calibration_failed"),
    ],
)
def test_unreadable_uploads_are_refused_and_not_stored(client, settings, content, headers, code):
    answer = upload(client, content, headers)
    assert (answer.status_code, answer.json()["code"]) == (422, code)
    assert "CANARY" not in answer.text
    assert kept(settings) == []
    assert "upload/" not in client.get("/calibrations").text


@pytest.mark.parametrize(
    ("content", "suffix"),
    [
        (b"\xef\xbb\xbfa text\n\nwith a mark", ".txt"),
        (b'{"text": "a"}\r\n\r\n{"text": "b"}\r\n', ".jsonl"),
        ('{"text": "ü"}\n'.encode() * 3, ".jsonl"),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 10**6])
def test_an_accepted_upload_is_read_the_same_by_a_job(tmp_path, content, suffix, step):
    check = uploads.DocumentCheck(suffix)
    pieces = [content[start : start + step] for start in range(0, len(content), step)]
    assert b"".join(check.passing(pieces)) == content
    file = tmp_path / f"file{suffix}"
    file.write_bytes(content)
    assert check.documents == len(list(documents(str(file), seed=0)))


def test_an_overlong_line_is_refused_before_it_is_complete(monkeypatch):
    monkeypatch.setattr(uploads, "_MAX_LINE_BYTES", 100)
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield b"a" * 40

    with pytest.raises(uploads.CalibrationError, match="line 1 is longer"):
        list(uploads.DocumentCheck(".txt").passing(endless()))
    assert len(taken) == 3


def test_uploads_have_their_own_size_limit(client, settings):
    most = settings.max_upload_bytes
    assert most > settings.max_body_bytes
    assert upload(client, b"a " * (most // 2), TEXT).status_code == 201
    for content in (b"a" * (most + 1), iter([b"a" * 1000] * (most // 1000 + 1))):
        answer = upload(client, content, TEXT)
        assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
    assert len(kept(settings)) == 1
    # The others keep their files.
    assert (
        client.post("/estimates", content=b" " * 5000, headers={"Content-Type": "application/json"}).status_code == 413
    )


def test_the_number_of_uploads_is_limited(client, app, settings):
    app.state.context.settings.__dict__["max_uploads"] = 2
    answers = [upload(client, f"text {number}".encode(), TEXT) for number in range(3)]
    assert [answer.status_code for answer in answers] == [201, 201, 429]
    assert answers[2].json()["code"] == "quota_exceeded"
    assert len(kept(settings)) == 2
    # An existing file takes no more room.
    assert upload(client, b"text 0", TEXT).status_code == 200


def test_concurrent_uploads_of_one_file_are_stored_once(client, settings):
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(upload(client))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer.status_code for answer in answers) == [200] * 11 + [201]
    assert len(kept(settings)) == 1


@pytest.mark.parametrize("part", ["calibration", "evaluate"])
def test_an_upload_in_use_by_a_job_cannot_be_deleted(client, worker, settings, part):
    path = upload(client).headers["Location"]
    body = BODY | {part: {"dataset": upload(client).json()["id"]}}
    job = client.post("/jobs", json=body).json()
    assert job[part]["dataset"] == body[part]["dataset"]
    refused = client.delete(path)
    assert (refused.status_code, refused.json()["code"]) == (409, "job_state_conflict")
    worker.fail(job["id"], JobError(code="x", message="m"))
    assert client.delete(path).status_code == 204
    assert kept(settings) == []
    assert client.get(path).status_code == 404
    assert client.post("/jobs", json=body).json()["code"] == "upload_not_found"
    assert client.post(f"/jobs/{job['id']}/retry").json()["code"] == "upload_not_found"


@pytest.mark.parametrize("dataset", ["upload/", "upload/x", "upload/" + "A" * 32, "upload/../" + "0" * 32])
def test_an_invalid_upload_id_is_refused(client, dataset):
    answer = client.post("/jobs", json=BODY | {"calibration": {"dataset": dataset}})
    assert (answer.status_code, answer.json()["param"]) == (422, "calibration.dataset")


def test_uploads_of_other_tenants_are_not_found(client, context):
    view = upload(client).json()
    upload_id = view["id"].removeprefix("upload/")
    assert uploads.list_uploads(context, "other") == []
    other = LOCAL_ACTOR.on_behalf_of("other")
    with pytest.raises(uploads.uploads.UploadNotFoundError):
        uploads.get_upload(context, "other", upload_id)
    with pytest.raises(uploads.uploads.UploadNotFoundError):
        uploads.delete_upload(context, other, upload_id)
    with pytest.raises(uploads.uploads.UploadNotFoundError):
        uploads.check_dataset(context, "other", view["id"])
    # The same content belongs to each of those who have sent it.
    theirs, is_new = uploads.save_upload(context, other, ".jsonl", [GOOD])
    assert (theirs.id, is_new) == (upload_id, True)
    uploads.delete_upload(context, other, upload_id)
    assert client.get(f"/calibrations/{upload_id}").status_code == 200


def test_an_uploaded_file_with_a_row_is_not_an_orphan(client, context, settings):
    upload(client)
    with context.database.snapshot() as session:
        assert sweeps.find_orphans(session, storage_keys=kept(settings), work_keys=()) == set()


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data; boundary=x", "text/html"])
def test_other_content_types_are_refused(client, kind):
    assert upload(client, headers={"Content-Type": kind} if kind else {}).status_code == 415


def test_the_operators_files_are_listed_first(client):
    upload(client)
    names = [row["id"].partition("/")[0] for row in client.get("/calibrations").json()["data"]]
    assert names[0] == "builtin"
    assert names[-2:] == ["local", "upload"]
    assert json.loads(client.get("/calibrations").text)["object"] == "list"
