import resource
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from app.shared.encryption import KEY_FILE, decrypt, encrypt
from app.shared.errors import DiskFullError, InvalidSettingsError, StorageError
from app.shared.settings import Settings

SECRET = SecretStr("hf_canary")


def settings_of(folder, **changes):
    return Settings(data_dir=folder, **changes)


def test_a_secret_is_restored_and_unreadable_when_stored(tmp_path):
    settings = settings_of(tmp_path / "data")
    stored = encrypt(settings, SECRET)
    assert "canary" not in stored
    assert stored != encrypt(settings, SECRET)
    assert decrypt(settings, stored).get_secret_value() == "hf_canary"


def test_the_key_file_is_private_and_persistent(tmp_path):
    settings = settings_of(tmp_path)
    encrypt(settings, SECRET)
    file = tmp_path / KEY_FILE
    key = file.read_bytes()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    encrypt(settings, SECRET)
    assert file.read_bytes() == key
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]


def test_concurrent_first_uses_get_the_same_key(tmp_path):
    settings = settings_of(tmp_path)
    with ThreadPoolExecutor(16) as pool:
        stored = list(pool.map(lambda _: encrypt(settings, SECRET), range(64)))
    assert {decrypt(settings, text).get_secret_value() for text in stored} == {"hf_canary"}


def test_the_key_from_the_settings_takes_precedence(tmp_path):
    chosen = settings_of(tmp_path, secret_key=SecretStr(Fernet.generate_key().decode()))
    stored = encrypt(chosen, SECRET)
    assert not (tmp_path / KEY_FILE).exists()
    with pytest.raises(InvalidSettingsError, match="ROCKET_SECRET_KEY") as caught:
        decrypt(settings_of(tmp_path), stored)
    assert stored not in str(caught.value)


def test_an_unwritable_folder_is_reported_with_what_to_do(tmp_path):
    (tmp_path / "data").write_text("a file")
    with pytest.raises(StorageError, match="set ROCKET_SECRET_KEY"):
        encrypt(settings_of(tmp_path / "data"), SECRET)


def test_a_full_disk_is_reported_as_such(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(DiskFullError, match="free some space"):
            encrypt(settings_of(tmp_path), SECRET)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
    encrypt(settings_of(tmp_path), SECRET)
