import pytest

from app.shared.catalog import find_dataset, find_local_model, list_calibrations, list_models
from app.shared.settings import Settings
from rocket_core.errors import ModelNotFoundError, UnknownDatasetError


@pytest.fixture
def settings(tmp_path):
    settings = Settings(data_dir=tmp_path)
    for name in ("b", "a", ".hidden"):
        (settings.models_folder / name).mkdir(parents=True)
        (settings.models_folder / name / "config.json").touch()
    (settings.models_folder / "empty").mkdir()
    (settings.models_folder / "file").touch()
    settings.datasets_folder.mkdir()
    for name in ("x.jsonl", "y.txt", "z.bin"):
        (settings.datasets_folder / name).touch()
    return settings


def test_only_folders_with_a_config_are_listed_as_models(settings):
    assert list_models(settings) == ["local/a", "local/b"]


def test_only_text_files_are_listed_for_calibration(settings):
    assert [name for name in list_calibrations(settings) if "/" in name] == ["local/x.jsonl", "local/y.txt"]


def test_every_listed_name_is_found(settings):
    for name in list_models(settings):
        assert (find_local_model(settings, name) / "config.json").is_file()
    for name in list_calibrations(settings):
        assert find_dataset(settings, name) == (
            str(settings.datasets_folder / name.removeprefix("local/")) if "/" in name else name
        )


@pytest.mark.parametrize("name", ["local/..", "local/.", "local/a/../b", "local/", "local/empty", "local/.hidden", "a"])
def test_unlisted_names_are_not_found_as_models(settings, name):
    with pytest.raises(ModelNotFoundError):
        find_local_model(settings, name)


@pytest.mark.parametrize("name", ["local/../x.jsonl", "local/z.bin", "local/x", "local//etc/passwd"])
def test_unlisted_names_are_not_found_as_datasets(settings, name):
    with pytest.raises(UnknownDatasetError):
        find_dataset(settings, name)


def test_without_folders_only_builtin_datasets_are_listed(tmp_path):
    settings = Settings(data_dir=tmp_path / "none")
    assert list_models(settings) == []
    assert "builtin" in list_calibrations(settings)
