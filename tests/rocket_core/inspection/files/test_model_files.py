import json
import shutil

import pytest

from rocket_core.checkpoint import find_model
from rocket_core.errors import CheckpointFormatError, UnsafeFileError
from rocket_core.evaluation import evaluate_text
from rocket_core.inspection.files.model_files import companions, copy_file, open_file, read_file, vet_folder
from rocket_core.pipeline import compress
from tests.reference.hostile_models import LARGE_FILES, LINKS, SECRET, edit_json
from tests.reference.observers import Watch
from tests.reference.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def ordinary(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("ordinary") / "llama")


@pytest.fixture
def model(ordinary, tmp_path):
    return shutil.copytree(ordinary, tmp_path / "model")


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "elsewhere" / "secret.key"
    file.parent.mkdir()
    file.write_text(SECRET)
    return file


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("a text that has nothing to do with the model. " * 40)
    return file


@pytest.fixture
def settings(text):
    from rocket_core.config import compression_config

    calibration = {"dataset": str(text), "samples": 4, "sequence_length": 16}
    return compression_config(ratio=0.3, calibration=calibration, cap_slack=0.01, export=["rocket", "dense"])


@pytest.mark.parametrize("build", LINKS.values(), ids=LINKS)
def test_a_folder_with_links_out_of_it_is_refused(build, model, secret, text, settings, tmp_path):
    model = build(model, secret) or model
    output = tmp_path / "output"

    with pytest.raises(UnsafeFileError, match=r"copy the file|remove it") as compressed:
        compress(str(model), output, settings)
    with pytest.raises(UnsafeFileError, match=r"copy the file|remove it"):
        evaluate_text(model, text, sequence_length=16, device="cpu")

    assert SECRET not in str(compressed.value)
    assert not any(SECRET in file.read_text(errors="ignore") for file in output.rglob("*") if file.is_file())


@pytest.mark.parametrize("build", LARGE_FILES.values(), ids=LARGE_FILES)
def test_a_file_too_large_for_the_disk_is_refused_in_preflight(build, model, secret, settings, tmp_path):
    build(model, secret)
    stages = set()
    with pytest.raises(UnsafeFileError, match="remove"):
        compress(
            str(model),
            tmp_path / "output",
            settings,
            observer=Watch(on_progress=lambda progress: stages.add(progress.stage)),
        )
    assert stages <= {"preflight"}


def test_an_adapter_is_refused(model, text, settings, tmp_path):
    edit_json(model / "adapter_config.json", peft_type="LORA", base_model_name_or_path="org/other")
    with pytest.raises(CheckpointFormatError, match="merge it"):
        compress(str(model), tmp_path / "output", settings)
    with pytest.raises(CheckpointFormatError, match="merge it"):
        evaluate_text(model, text, sequence_length=16, device="cpu")


def test_links_within_the_folder_are_followed(model, settings, tmp_path):
    (model / "kept").mkdir()
    (model / "tokenizer.json").rename(model / "kept" / "tokenizer.json")
    (model / "tokenizer.json").symlink_to("kept/tokenizer.json")
    compress(str(model), tmp_path / "output", settings)
    copy = tmp_path / "output" / "dense" / "tokenizer.json"
    assert not copy.is_symlink()
    assert copy.read_bytes() == (model / "kept" / "tokenizer.json").read_bytes()


def test_the_layout_of_the_hub_cache_is_followed(model, settings, tmp_path):
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        file.rename(repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    compress(str(snapshot), tmp_path / "output", settings)
    assert (tmp_path / "output" / "rocket" / "tokenizer.json").is_file()


def test_unread_folders_may_be_links(model, secret):
    (model / "outputs").symlink_to(secret.parent)
    vet_folder(model, "model")


def test_a_link_to_a_folder_is_resolved(model, tmp_path):
    (tmp_path / "link").symlink_to(model)
    assert find_model(str(tmp_path / "link")).folder == model


def test_a_file_replaced_by_a_link_after_the_check_is_not_copied(model, secret, tmp_path):
    (model / "LICENSE").write_text("free")
    (file,) = [file for file in companions(model, "model") if file.name == "LICENSE"]
    (model / "LICENSE").unlink()
    (model / "LICENSE").symlink_to(secret)
    with pytest.raises(UnsafeFileError, match="leads out"):
        copy_file(model, file, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_file_replaced_by_a_link_while_opening_is_refused(model, secret, monkeypatch):
    from rocket_core.inspection.files import model_files

    resolve = model_files._target

    def swap(root, file, name):
        found = resolve(root, file, name)
        file.unlink()
        file.symlink_to(secret)
        return found

    monkeypatch.setattr(model_files, "_target", swap)
    with pytest.raises(UnsafeFileError, match="changed"):
        read_file(model, "config.json")


def test_a_file_that_grows_while_copied_is_truncated(model, tmp_path, monkeypatch):
    from rocket_core.inspection.files import model_files

    (model / "LICENSE").write_text("free")
    (file,) = [file for file in companions(model, "model") if file.name == "LICENSE"]
    monkeypatch.setattr(model_files, "MAX_SMALL_BYTES", 1000)
    (model / "LICENSE").write_text("free" * 1000)
    with pytest.raises(UnsafeFileError, match="larger than"):
        copy_file(model, file, tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_size <= 1000


def test_a_file_name_cannot_forge_a_log_line(model, secret):
    (model / "LICENSE\n2026 ERROR forged").symlink_to(secret)
    with pytest.raises(UnsafeFileError) as refused:
        vet_folder(model, "model")
    assert "\n" not in str(refused.value)


def test_reading_respects_its_limit(model):
    assert json.loads(read_file(model, "config.json"))["model_type"] == "llama"
    with pytest.raises(UnsafeFileError, match="larger"):
        read_file(model, "config.json", limit=10)
    with pytest.raises(FileNotFoundError), open_file(model, model / "missing"):
        pass
