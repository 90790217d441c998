import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from app.shared.encryption import KEY_FILE, decrypt, encrypt
from app.shared.errors import InvalidSettingsError, StorageError
from app.shared.settings import Settings

SECRET = SecretStr("hf_canary")


def settings_of(folder, **changes):
    return Settings(data_dir=folder, **changes)


def test_a_secret_comes_back_and_cannot_be_read_in_between(tmp_path):
    settings = settings_of(tmp_path / "data")
    stored = encrypt(settings, SECRET)
    assert "canary" not in stored
    assert stored != encrypt(settings, SECRET)
    assert decrypt(settings, stored).get_secret_value() == "hf_canary"


def test_the_key_is_for_the_owner_alone_and_stays(tmp_path):
    settings = settings_of(tmp_path)
    encrypt(settings, SECRET)
    file = tmp_path / KEY_FILE
    key = file.read_bytes()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    encrypt(settings, SECRET)
    assert file.read_bytes() == key
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]


def test_all_who_need_the_first_key_at_once_get_the_same(tmp_path):
    settings = settings_of(tmp_path)
    with ThreadPoolExecutor(16) as pool:
        stored = list(pool.map(lambda _: encrypt(settings, SECRET), range(64)))
    assert {decrypt(settings, text).get_secret_value() for text in stored} == {"hf_canary"}


def test_the_key_of_the_settings_wins(tmp_path):
    chosen = settings_of(tmp_path, secret_key=SecretStr(Fernet.generate_key().decode()))
    stored = encrypt(chosen, SECRET)
    assert not (tmp_path / KEY_FILE).exists()
    with pytest.raises(InvalidSettingsError, match="ROCKET_SECRET_KEY") as caught:
        decrypt(settings_of(tmp_path), stored)
    assert stored not in str(caught.value)


def test_a_folder_that_cannot_be_written_says_what_to_do(tmp_path):
    (tmp_path / "data").write_text("a file")
    with pytest.raises(StorageError, match="set ROCKET_SECRET_KEY"):
        encrypt(settings_of(tmp_path / "data"), SECRET)
