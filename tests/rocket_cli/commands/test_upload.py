import json
import tracemalloc

import pytest

from app.shared.encryption import decrypt
from app.shared.models import Job
from rocket_client import _model_upload, _requests
from rocket_client.errors import InvalidArgumentError, ProblemError
from tests.reference.safetensors_files import save_llama

LINES = '{"text": "one"}\n{"text": "two"}\n'
TOKEN = "hf_canary0123456789"  # noqa: S105 - no real one


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text(LINES)
    return file


def test_the_upload_id_goes_to_stdout(remote, client, file):
    outcome = remote("upload", file)
    name = outcome.out.strip()
    assert outcome.code == 0
    assert f"2 documents; use them with `rocket submit ... --calibration {name}`" in outcome.err
    assert name in client.calibrations()
    assert remote("submit", "local/tiny", "--ratio", "0.3", "--calibration", name).code == 0
    assert client.list_jobs().data[0].calibration.dataset == name
    assert json.loads(remote("upload", file, "--json").out)["id"] == name


@pytest.mark.both_clients
def test_a_file_is_uploaded_without_loading_it_into_memory(client, tmp_path):
    file = tmp_path / "long.txt"
    file.write_bytes((b"word " * 2000 + b"\n") * 1600)
    # The server's part in this process also takes constant memory.
    tracemalloc.start()
    try:
        assert client.upload(file).documents == 1
        assert tracemalloc.get_traced_memory()[1] < file.stat().st_size / 2
    finally:
        tracemalloc.stop()


@pytest.mark.both_clients
def test_an_upload_can_be_deleted(client, file):
    kept = client.upload(file)
    assert client.get_upload(kept.id) == kept
    client.delete_upload(kept.id)
    assert kept.id not in client.calibrations()
    with pytest.raises(InvalidArgumentError, match="is not an upload id"):
        client.delete_upload("local/mine.jsonl")


def test_an_unusable_file_is_refused(remote, tmp_path, file):
    (tmp_path / "a.pdf").touch()
    assert remote("upload", tmp_path / "a.pdf").code == 2
    assert remote("upload", tmp_path / "none.txt").code == 2
    file.write_text("no json")
    outcome = remote("upload", file)
    assert outcome.code == 3
    assert "line 1 is not valid JSON" in outcome.err


@pytest.fixture
def folder(tmp_path):
    return save_llama(tmp_path / "my-model")


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(_model_upload, "_PIECE_BYTES", 2**16)


def test_a_model_is_uploaded_and_submitted(remote, client, folder):
    outcome = remote("upload", folder)
    assert (outcome.code, outcome.out) == (0, "upload/my-model\n")
    assert "rocket submit upload/my-model --ratio 0.3" in outcome.err
    assert remote("models").out.splitlines() == ["local/tiny", "upload/my-model"]
    assert remote("submit", "upload/my-model", "--ratio", "0.3").code == 0
    assert json.loads(remote("upload", folder, "--name", "other", "--json").out)["id"] == "upload/other"
    assert remote("models", "--delete", "upload/other").code == 0
    assert "upload/other" not in client.models()


@pytest.mark.both_clients
def test_an_interrupted_model_continues_where_it_was(client, folder, small_pieces):
    shown = []

    def stop(progress):
        shown.append(progress)
        if progress.done > 50_000:
            raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        client.upload_model(folder, on_progress=stop)
    assert [model.problem is None for model in client.list_models()] == [True, False]
    assert client.models() == ["local/tiny"]
    again = []
    model = client.upload_model(folder, on_progress=again.append)
    assert (model.id, model.status) == ("upload/my-model", "ready")
    assert again[-1].received == model.size - shown[-1].done
    repeated = []
    assert client.upload_model(folder, on_progress=repeated.append) == model
    assert repeated[-1].received == 0


def test_another_file_does_not_continue_an_upload(client, folder, small_pieces):
    def stop(progress):
        if progress.done > 50_000:
            raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        client.upload_model(folder, on_progress=stop)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[30_000] ^= 1
    weights.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match="is not the file of which the server has the first"):
        client.upload_model(folder)


def test_a_refused_model_costs_its_headers_only(remote, client, folder, small_pieces):
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}
    (folder / "config.json").write_text(json.dumps(config))
    shown = []
    with pytest.raises(ProblemError, match="quantized") as refused:
        client.upload_model(folder, on_progress=shown.append)
    assert refused.value.code == "already_quantized"
    assert shown[-1].received < 10_000 < shown[-1].total
    outcome = remote("upload", folder)
    assert outcome.code == 3
    assert "quantized" in outcome.err


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        (["model.gguf"], "GGUF"),
        (["adapter_config.json", "config.json"], "merge_and_unload"),
        (["config.json", "pytorch_model.bin"], "safe_serialization=True"),
        ([], "give a transformers checkpoint"),
    ],
)
def test_a_folder_without_a_model_is_refused_with_advice(remote, tmp_path, files, advice):
    for file in files:
        (tmp_path / file).touch()
    outcome = remote("upload", tmp_path, "--name", "x")
    assert outcome.code == 2
    assert advice in outcome.err


@pytest.mark.both_clients
def test_an_estimate_has_typed_members(client):
    told = client.estimate("local/tiny", ratio=0.3)
    assert told.kept_parameters < told.compressible_parameters < told.parameters


def test_a_token_comes_from_the_environment(remote, service, client, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    options = ("--ratio", "0.3", "--calibration", "c4", "--hub-token-env", "MY_TOKEN")
    assert remote("submit", "local/tiny", *options).code == 0
    with service.database.snapshot() as session:
        stored = session.get_one(Job, client.list_jobs().data[0].id).hub_token
    assert decrypt(service.settings, stored).get_secret_value() == TOKEN


def test_a_token_given_as_variable_name_is_not_echoed(remote, client):
    outcome = remote("submit", "local/tiny", "--ratio", "0.3", "--hub-token-env", TOKEN)
    assert outcome.code == 2
    assert "canary" not in outcome.err + outcome.out
    assert client.list_jobs().data == ()


class TestOtherFormats:
    @pytest.fixture
    def sent(self, monkeypatch):
        """Return the content of each upload."""
        contents = []
        real = _requests.calibration_upload

        def upload(file):
            contents.append((file.name, [json.loads(line) for line in file.read_text().splitlines()]))
            return real(file)

        monkeypatch.setattr("rocket_client._account.calibration_upload", upload)
        return contents

    def test_a_table_is_sent_as_lines(self, remote, sent, tmp_path):
        (tmp_path / "own.csv").write_text("body,id\none,1\ntwo,2\n")
        outcome = remote("upload", tmp_path / "own.csv", "--calibration-column", "body")
        assert outcome.code == 0, outcome.err
        assert sent == [("own.jsonl", [{"text": "one"}, {"text": "two"}])]

    def test_chats_are_sent_as_messages_without_bad_rows(self, remote, sent, tmp_path):
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        (tmp_path / "own.json").write_text(json.dumps([chat, {"other": 1}]))
        assert remote("upload", tmp_path / "own.json").code != 0
        outcome = remote("upload", tmp_path / "own.json", "--skip-bad-rows")
        assert outcome.code == 0, outcome.err
        assert "1 rows without text are left out" in outcome.err
        assert sent == [("own.jsonl", [chat])]

    def test_a_folder_of_texts_is_no_model(self, remote, sent, tmp_path):
        (tmp_path / "texts").mkdir()
        (tmp_path / "texts" / "a.md").write_text("one")
        assert remote("upload", tmp_path / "texts").code == 0
        assert sent == [("texts.jsonl", [{"text": "one"}])]
