from app.shared.catalog import list_models
from app.shared.settings import Settings
from rocket_cli.service.sample import create_models_folder


def test_a_new_service_offers_the_sample_model(tmp_path):
    settings = Settings(data_dir=tmp_path / "data")
    create_models_folder(settings.models_folder)
    assert list_models(settings) == ["local/tiny-llama"]


def test_a_models_folder_is_left_as_it_is(tmp_path):
    create_models_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_installation_without_the_sample_starts_empty(tmp_path):
    create_models_folder(tmp_path / "models", tmp_path / "none")
    assert list((tmp_path / "models").iterdir()) == []
