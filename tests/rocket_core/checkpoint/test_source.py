import pytest
from huggingface_hub import utils

from rocket_core.checkpoint import find_model, open_checkpoint, source
from rocket_core.errors import HubUnavailableError, ModelNotFoundError
from tests.reference.fake_hub import COMMIT, FakeHub
from tests.reference.tiny_models import save_tiny_model


@pytest.fixture
def hub(monkeypatch):
    with FakeHub() as fake:
        fake.replace_the_hub(monkeypatch)
        yield fake
        utils.close_session()


def test_a_folder_wins_and_is_made_absolute(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    found = find_model("org/name")
    assert (found.name, found.folder, found.commit) == ("name", (tmp_path / "org" / "name").resolve(), None)


def test_a_folder_has_no_revision(tmp_path):
    with pytest.raises(ModelNotFoundError, match="revision 'main'"):
        find_model(str(tmp_path), "main")


def test_a_repository_is_pinned_to_a_commit_and_only_safe_files_are_fetched(hub, tmp_path, monkeypatch):
    hub.repositories["org/name"] = {}
    asked = []
    monkeypatch.setattr(source, "snapshot_download", lambda model, **how: asked.append((model, how)) or str(tmp_path))
    found = find_model("org/name", "v1")
    assert (found.commit, found.folder) == (COMMIT, tmp_path)
    ((model, how),) = asked
    assert (model, how["revision"]) == ("org/name", COMMIT)
    assert not any(pattern.endswith((".bin", ".pt", ".py", ".pkl")) for pattern in how["allow_patterns"])


@pytest.mark.parametrize("name", ["../etc", "/no/such/folder", "https://example.org/x", "a--b/c..d", "models/"])
def test_what_can_be_no_repository_is_refused_without_asking(hub, name):
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


def test_a_hub_that_has_gone_is_worth_another_try(hub):
    hub.__exit__()
    with pytest.raises(HubUnavailableError, match="cannot be reached"):
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
