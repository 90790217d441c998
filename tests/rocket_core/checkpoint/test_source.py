import httpx2
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError

from rocket_core.checkpoint import find_model, open_checkpoint, source
from rocket_core.errors import HubUnavailableError, ModelNotFoundError
from tests.reference.tiny_models import save_tiny_model


class FakeHub:
    def __init__(self, *, error=None, folder=None):
        self.error, self.folder, self.asked = error, folder, []

    def model_info(self, model, *, revision):
        self.asked.append((model, revision))
        if self.error:
            raise self.error
        return type("Info", (), {"sha": "c0ffee"})()

    def snapshot_download(self, model, **kwargs):
        self.asked.append((model, kwargs))
        return str(self.folder)


@pytest.fixture
def hub(monkeypatch):
    def install(**kwargs):
        fake = FakeHub(**kwargs)
        monkeypatch.setattr(source, "HfApi", lambda: fake)
        monkeypatch.setattr(source, "snapshot_download", fake.snapshot_download)
        return fake

    return install


def hub_error(kind, status):
    request = httpx2.Request("GET", "http://hub.invalid")
    return kind("gone", response=httpx2.Response(status, request=request))


def test_a_folder_wins_and_is_made_absolute(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    found = find_model("org/name")
    assert (found.name, found.folder, found.commit) == ("name", (tmp_path / "org" / "name").resolve(), None)


def test_a_folder_has_no_revision(tmp_path):
    with pytest.raises(ModelNotFoundError, match="revision 'main'"):
        find_model(str(tmp_path), "main")


def test_a_repository_is_pinned_to_a_commit_and_only_safe_files_are_fetched(hub, tmp_path):
    fake = hub(folder=tmp_path)
    found = find_model("org/name", "v1")
    assert found.commit == "c0ffee"
    assert fake.asked[0] == ("org/name", "v1")
    assert fake.asked[1][1]["revision"] == "c0ffee"
    assert not any(pattern.endswith((".bin", ".pt", ".py", ".pkl")) for pattern in fake.asked[1][1]["allow_patterns"])


@pytest.mark.parametrize("name", ["../etc", "/no/such/folder", "https://example.org/x", "a--b/c..d", "models/"])
def test_what_can_be_no_repository_is_refused_without_asking(hub, name):
    fake = hub()
    with pytest.raises(ModelNotFoundError, match="neither a folder nor a repository"):
        find_model(name)
    assert fake.asked == []


@pytest.mark.parametrize(
    ("error", "raised", "says"),
    [
        (httpx2.ConnectError("no route"), HubUnavailableError, "try again later"),
        (OfflineModeIsEnabled("offline"), HubUnavailableError, "cannot be reached"),
        (hub_error(RepositoryNotFoundError, 404), ModelNotFoundError, "HF_TOKEN"),
        (hub_error(RevisionNotFoundError, 404), ModelNotFoundError, "revision"),
    ],
)
def test_hub_errors_say_what_to_do(hub, error, raised, says):
    hub(error=error)
    with pytest.raises(raised, match=says):
        find_model("org/name", "v1")


def test_revision_of_a_folder_changes_with_its_weights(tmp_path):
    save_tiny_model("llama", tmp_path / "a")
    save_tiny_model("llama", tmp_path / "b")
    first, second = (find_model(str(tmp_path / name)) for name in "ab")
    assert first.revision(open_checkpoint(first.folder)) == second.revision(open_checkpoint(second.folder))
    file = tmp_path / "b" / "model.safetensors"
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    file.write_bytes(changed)
    assert first.revision(open_checkpoint(first.folder)) != second.revision(open_checkpoint(second.folder))
