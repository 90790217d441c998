import os
import time

import pytest
from huggingface_hub import utils

from rocket_core import compress, compression_config
from rocket_core.checkpoint import Transfer, find_model, open_checkpoint, source
from rocket_core.errors import (
    AlreadyQuantizedError,
    CompressionCancelledError,
    CorruptCheckpointError,
    HubUnavailableError,
    InfeasibleBudgetError,
    InsufficientDiskError,
    ModelNotFoundError,
    UnmatchedIgnoreError,
    UnsupportedArchitectureError,
)
from rocket_core.hub.repository import HubAccess
from tests.reference.fake_hub import COMMIT, FakeHub
from tests.reference.safetensors_files import llama_tensors, safetensors_bytes
from tests.reference.tiny_models import save_tiny_model

WEIGHTS = safetensors_bytes(llama_tensors())


@pytest.fixture
def hub(monkeypatch):
    with FakeHub() as fake:
        fake.replace_the_hub(monkeypatch)
        fake.repositories["org/name"] = {"config.json": b'{"model_type": "llama"}', "model.safetensors": WEIGHTS}
        yield fake
        utils.close_session()


@pytest.fixture
def cached(tmp_path):
    return HubAccess(cache=tmp_path)


def test_a_folder_takes_precedence_and_becomes_absolute(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    found = find_model("org/name")
    assert (found.name, found.folder, found.commit) == ("name", (tmp_path / "org" / "name").resolve(), None)


def test_a_folder_has_no_revision(tmp_path):
    with pytest.raises(ModelNotFoundError, match="revision 'main'"):
        find_model(str(tmp_path), "main")


def test_a_file_is_not_taken_for_a_repository(tmp_path):
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ModelNotFoundError, match=r"model\.gguf is a file; name the folder that it is in"):
        find_model(str(file))


def test_a_repository_is_pinned_and_only_safe_files_are_fetched(hub, cached, tmp_path):
    hub.repositories["org/name"] |= {
        "pytorch_model.bin": b"a pickle",
        "modeling_own.py": b"code",
        "adapter_model.safetensors": b"of another tool",
        "original/model.safetensors": b"the same again",
        "tokenizer.model": b"tokens",
    }
    found = find_model("org/name", "v1", hub=cached)
    assert found.commit == COMMIT
    assert found.folder.is_relative_to(tmp_path)
    assert {file.name for file in found.folder.rglob("*")} == {"config.json", "model.safetensors", "tokenizer.model"}
    assert (found.folder / "model.safetensors").read_bytes() == WEIGHTS
    fetched = {path for path, _, _ in hub.asked}
    assert not [path for path in fetched if path.endswith((".bin", ".py")) or "adapter" in path or "original" in path]


def test_a_token_is_sent_with_every_request(hub, tmp_path):
    find_model("org/name", hub=HubAccess(token="hf_mine", cache=tmp_path))  # noqa: S106 - of the fake hub
    assert {token for _, token, _ in hub.asked} == {"Bearer hf_mine"}
    assert "hf_mine" not in repr(HubAccess(token="hf_mine"))  # noqa: S106 - as above


@pytest.mark.parametrize(
    ("files", "target", "error"),
    [
        ({"config.json": b'{"model_type": "llama", "quantization_config": {}}'}, {"ratio": 0.3}, AlreadyQuantizedError),
        (
            {"config.json": b'{"model_type": "qwen", "auto_map": {"AutoConfig": "a.B"}}'},
            {"ratio": 0.3},
            UnsupportedArchitectureError,
        ),
        ({"model.safetensors": WEIGHTS[:-1]}, {"ratio": 0.3}, CorruptCheckpointError),
        ({}, {"ratio": 0.95}, InfeasibleBudgetError),
        ({}, {"target_bytes": 1}, InfeasibleBudgetError),
        ({}, {"ratio": 0.3, "ignore": ("*.nothing",)}, UnmatchedIgnoreError),
    ],
)
def test_incompressible_models_are_refused_before_download(hub, cached, files, target, error):
    hub.repositories["org/name"] |= files
    with pytest.raises(error):
        find_model("org/name", hub=cached, config=compression_config(**target))
    whole = [path for path, _, part in hub.asked if path.endswith("model.safetensors") and part is None]
    assert whole == []


def test_an_unreachable_size_is_refused_before_fetching_weights(hub, cached, tmp_path):
    with pytest.raises(InfeasibleBudgetError):
        compress("org/name", tmp_path / "out", compression_config(target_bytes=1), hub=cached)
    assert [path for path, _, part in hub.asked if path.endswith("model.safetensors") and part is None] == []


def test_a_download_that_does_not_fit_is_not_started(hub, cached, monkeypatch):
    monkeypatch.setattr(source, "free_disk", lambda _folder: len(WEIGHTS) - 1)
    with pytest.raises(InsufficientDiskError, match="HF_HOME"):
        find_model("org/name", hub=cached)
    monkeypatch.undo()
    hub.replace_the_hub(monkeypatch)
    find_model("org/name", hub=cached)
    # An existing download takes no room.
    monkeypatch.setattr(source, "free_disk", lambda _folder: 0)
    assert find_model("org/name", hub=cached).commit == COMMIT


def test_a_file_of_another_size_than_announced_is_refused(hub, cached):
    hub.announced = {"config.json": 1}
    with pytest.raises(CorruptCheckpointError, match=r"config\.json of org/name has \d+ bytes, the Hub announces 1"):
        find_model("org/name", hub=cached)


def test_received_bytes_are_counted(hub, cached):
    transfer = Transfer()
    find_model("org/name", hub=cached, transfer=transfer)
    assert transfer.done == transfer.total == sum(map(len, hub.repositories["org/name"].values()))
    assert transfer.share == 1.0


def test_a_stopped_download_ends(hub, cached, tmp_path):
    transfer = Transfer()
    transfer.stop()
    with pytest.raises(CompressionCancelledError):
        find_model("org/name", hub=cached, transfer=transfer)
    assert not list(tmp_path.rglob("*.incomplete"))


def test_only_old_remains_of_killed_downloads_are_removed(hub, cached, tmp_path):
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    for name, age in (("old", 7200), ("young", 60)):
        (blobs / f"{name}.incomplete").touch()
        os.utime(blobs / f"{name}.incomplete", (time.time() - age,) * 2)
    find_model("org/name", hub=cached)
    assert [file.name for file in blobs.glob("*.incomplete")] == ["young.incomplete"]


@pytest.mark.parametrize("name", ["../etc", "/no/such/folder", "https://example.org/x", "a--b/c..d", "models/"])
def test_an_invalid_repository_name_is_refused_without_a_request(hub, name):
    with pytest.raises(ModelNotFoundError, match="neither a folder nor a repository"):
        find_model(name)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("status", "code", "raised", "says"),
    [
        (404, "RepoNotFound", ModelNotFoundError, r"org/name \(there is no such folder\): not on the Hub.*HF_TOKEN"),
        (404, "RevisionNotFound", ModelNotFoundError, "no such revision"),
        (403, "GatedRepo", ModelNotFoundError, "accept its terms"),
        (500, None, HubUnavailableError, "try again later"),
    ],
)
def test_hub_errors_say_what_to_do(hub, status, code, raised, says):
    hub.refusals = [("/api/models/org/name", status, code)]
    with pytest.raises(raised, match=says):
        find_model("org/name", "v1")


def test_an_unreachable_hub_is_retryable(hub):
    hub.__exit__()
    with pytest.raises(HubUnavailableError, match="cannot be reached"):
        find_model("org/name", "v1")


def test_the_revision_of_a_folder_changes_with_its_weights(tmp_path):
    save_tiny_model("llama", tmp_path / "a")
    save_tiny_model("llama", tmp_path / "b")
    first, second = (find_model(str(tmp_path / name)) for name in "ab")
    assert first.revision(open_checkpoint(first.folder)) == second.revision(open_checkpoint(second.folder))
    file = tmp_path / "b" / "model.safetensors"
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    file.write_bytes(changed)
    assert first.revision(open_checkpoint(first.folder)) != second.revision(open_checkpoint(second.folder))
