import base64
import io
import logging

import pytest

from app.shared.errors import InvalidSettingsError
from app.shared.logging import configure_logging
from app.shared.settings import Settings, deprecated_variables, describe, load_settings

KEY = base64.urlsafe_b64encode(bytes(range(32))).decode()


def test_defaults_need_no_environment_and_use_one_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = load_settings()
    assert settings.data_dir == tmp_path / "rocket-data"
    assert settings.models_folder == tmp_path / "rocket-data" / "models"
    assert settings.datasets_folder == tmp_path / "rocket-data" / "datasets"
    assert settings.database.database == str(tmp_path / "rocket-data" / "rocket.sqlite3")
    assert settings.broker == "memory://"
    assert settings.max_attempts == 5


def test_every_setting_is_read_from_its_variable(monkeypatch, tmp_path):
    values = {
        "ROCKET_DATA_DIR": str(tmp_path),
        "ROCKET_MODELS_DIR": str(tmp_path / "m"),
        "ROCKET_DATASETS_DIR": str(tmp_path / "d"),
        "ROCKET_DATABASE_URL": "postgresql+psycopg://u:p@h/n",
        "ROCKET_BROKER_URL": "redis://h",
        "ROCKET_STORAGE_URL": "s3://bucket/prefix",
        "ROCKET_S3_ENDPOINT_URL": "http://store:9000",
        "ROCKET_REDIRECT_DOWNLOADS": "true",
        "ROCKET_SECRET_KEY": KEY,
        "ROCKET_ALLOWED_HOSTS": "rocket.example",
        "ROCKET_TRUSTED_PROXIES": "10.0.0.7",
        "ROCKET_DEFAULT_QUEUE": "gpu",
        "ROCKET_MAX_ATTEMPTS": "7",
        "ROCKET_LEASE_SECONDS": "7",
        "ROCKET_POLL_SECONDS": "7",
        "ROCKET_HELP_JOBS": "true",
        "ROCKET_NOTIFY_SECONDS": "7",
        "ROCKET_RETRY_BACKOFF_SECONDS": "7",
        "ROCKET_CANCEL_GRACE_SECONDS": "7",
        "ROCKET_STALL_SECONDS": "7",
        "ROCKET_ARTIFACT_RETENTION_DAYS": "8",
        "ROCKET_JOB_RETENTION_DAYS": "7",
        "ROCKET_PROFILE_RETENTION_DAYS": "7",
        "ROCKET_PROFILE_CACHE_BYTES": "7",
        "ROCKET_HUB_CACHE_BYTES": "7",
        "ROCKET_IDEMPOTENCY_HOURS": "7",
        "ROCKET_MAX_BODY_BYTES": "7777",
        "ROCKET_MAX_STREAMS": "7",
        "ROCKET_MAX_CONNECTIONS_PER_ADDRESS": "7",
        "ROCKET_HEAD_SECONDS": "7",
        "ROCKET_BODY_SECONDS": "7",
        "ROCKET_MIN_BODY_RATE": "7",
        "ROCKET_SEND_SECONDS": "7",
        "ROCKET_MAX_TENANT_STREAMS": "7",
        "ROCKET_MAX_ACTIVE_JOBS": "7",
        "ROCKET_MAX_STORED_BYTES": "7",
        "ROCKET_MAX_MODEL_BYTES": "7",
        "ROCKET_MAX_CALIBRATION_TOKENS": "7",
        "ROCKET_MEASURE_ENERGY": "false",
        "ROCKET_MAX_UPLOAD_BYTES": "7777",
        "ROCKET_MAX_CONCURRENT_UPLOADS": "7",
        "ROCKET_UPLOAD_SECONDS": "7",
        "ROCKET_MAX_UPLOADS": "7",
        "ROCKET_MAX_MODELS": "7",
        "ROCKET_UNFINISHED_MODEL_HOURS": "7",
        "ROCKET_MODEL_RETENTION_DAYS": "7",
        "ROCKET_TENANTS_MANAGE_KEYS": "True",
        "ROCKET_MAX_WEBHOOKS": "7",
        "ROCKET_WEBHOOKS_ALLOW_PRIVATE": "True",
        "ROCKET_MAX_PROFILES": "7",
        "ROCKET_RATE_LIMIT": "7/second",
        "ROCKET_SUBMIT_RATE_LIMIT": "7/second",
        "ROCKET_ISOLATION": "required",
        "ROCKET_PRELOAD_LIBRARY": "false",
        "ROCKET_MAX_JOB_MEMORY_BYTES": "2147483648",
        "ROCKET_METRICS_PORT": "7",
        "ROCKET_METRICS_HOST": "10.0.0.7",
        "ROCKET_LOG_LEVEL": "debug",
        "ROCKET_LOG_FORMAT": "json",
        "HF_TOKEN": "hf_secret",
    }
    assert [row.variable for row in describe()] == list(values)
    for variable, value in values.items():
        monkeypatch.setenv(variable, value)
    plain = load_settings().model_dump(mode="python")
    assert {name for name in plain if plain[name] == Settings.model_fields[name].default} == set()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ROCKET_MAX_ATTEMPTS", "0"),
        ("ROCKET_MAX_ATTEMPTS", "many"),
        ("ROCKET_LEASE_SECONDS", "-1"),
        ("ROCKET_LEASE_SECONDS", "nan"),
        ("ROCKET_POLL_SECONDS", "inf"),
        ("ROCKET_ARTIFACT_RETENTION_DAYS", "0"),
        ("ROCKET_PROFILE_RETENTION_DAYS", "0"),
        ("ROCKET_MAX_PROFILES", "0"),
        ("ROCKET_DATABASE_URL", "mysql://h/n"),
        ("ROCKET_DATABASE_URL", "sqlite://"),
        ("ROCKET_DATABASE_URL", "sqlite:///:memory:"),
        ("ROCKET_DATABASE_URL", "no url"),
        ("ROCKET_BROKER_URL", "filesystem://"),
        ("ROCKET_BROKER_URL", "sqla+sqlite:///x"),
        ("ROCKET_LOG_LEVEL", "chatty"),
        ("ROCKET_TRUSTED_PROXIES", "proxy.example.com"),
        ("ROCKET_TRUSTED_PROXIES", "localhost"),
        ("ROCKET_TRUSTED_PROXIES", "*"),
        ("ROCKET_TRUSTED_PROXIES", "10.0.0.1:80"),
        ("ROCKET_TRUSTED_PROXIES", "10.0.0.1/8"),
        ("ROCKET_TRUSTED_PROXIES", "10.0.0.0/33"),
        ("ROCKET_TRUSTED_PROXIES", "10.0.0.1 10.0.0.2"),
        ("ROCKET_TRUSTED_PROXIES", "10.0.0.1,,10.0.0.2"),
        ("ROCKET_TRUSTED_PROXIES", "0.0.0.0/0"),
        ("ROCKET_TRUSTED_PROXIES", "::/0"),
        ("ROCKET_TRUSTED_PROXIES", "fe80::1%eth0"),
        ("ROCKET_HEAD_SECONDS", "0"),
        ("ROCKET_BODY_SECONDS", "inf"),
        ("ROCKET_MIN_BODY_RATE", "-1"),
        ("ROCKET_SEND_SECONDS", "0"),
        ("ROCKET_MAX_CONNECTIONS_PER_ADDRESS", "0"),
        ("ROCKET_STORAGE_URL", "ftp://h/x"),
        ("ROCKET_STORAGE_URL", "s3://"),
        ("ROCKET_STORAGE_URL", "s3://key:secret@bucket"),
        ("ROCKET_STORAGE_URL", "file://host/folder"),
        ("ROCKET_S3_ENDPOINT_URL", "store:9000"),
        ("ROCKET_S3_ENDPOINT_URL", "http://store:9000"),
        ("ROCKET_REDIRECT_DOWNLOADS", "true"),
        ("ROCKET_SECRET_KEY", "short"),
        ("ROCKET_SECRET_KEY", "ä" * 44),
        ("ROCKET_DEFAULT_QUEUE", "tpu"),
        ("ROCKET_RATE_LIMIT", "often"),
        ("ROCKET_SUBMIT_RATE_LIMIT", "12"),
        ("ROCKET_MAX_STORED_BYTES", "0"),
        ("ROCKET_METRICS_PORT", "70000"),
        ("ROCKET_METRICS_HOST", "everywhere"),
    ],
)
def test_invalid_values_are_refused_by_variable_name(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidSettingsError, match=variable):
        load_settings()


def test_a_misspelt_variable_gets_a_suggestion(monkeypatch):
    monkeypatch.setenv("ROCKET_MAX_ATTEMPT", "3")
    with pytest.raises(InvalidSettingsError, match="did you mean ROCKET_MAX_ATTEMPTS"):
        load_settings()


RENAMED = [
    ("ROCKET_RING_SECONDS", "ROCKET_NOTIFY_SECONDS", "notify_seconds"),
    ("ROCKET_KEPT_PROFILES_BYTES", "ROCKET_PROFILE_CACHE_BYTES", "profile_cache_bytes"),
]


@pytest.mark.parametrize(("old", "new", "name"), RENAMED)
def test_old_name_of_a_setting_still_works_and_the_log_warns(monkeypatch, old, new, name):
    monkeypatch.setenv(old, "7")
    settings = load_settings()
    assert getattr(settings, name) == 7
    assert old not in settings.environment()
    assert settings.environment()[new] in {"7", "7.0"}
    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", [])
        configure_logging(settings, stream)
    (line,) = stream.getvalue().splitlines()
    assert " warning " in line
    assert f"{old} is deprecated; set {new} instead" in line


@pytest.mark.parametrize(("old", "new", "name"), RENAMED)
def test_new_name_of_a_setting_works_without_a_warning(monkeypatch, old, new, name):
    monkeypatch.setenv(new, "7")
    assert getattr(load_settings(), name) == 7
    assert list(deprecated_variables()) == []
    # As everywhere, an empty variable counts as unset.
    monkeypatch.setenv(old, "")
    assert getattr(load_settings(), name) == 7
    assert list(deprecated_variables()) == []


@pytest.mark.parametrize(("old", "new", "name"), RENAMED)
def test_old_and_new_name_of_a_setting_must_agree(monkeypatch, old, new, name):
    monkeypatch.setenv(old, "7")
    monkeypatch.setenv(new, "7")
    assert getattr(load_settings(), name) == 7
    monkeypatch.setenv(new, "8")
    with pytest.raises(InvalidSettingsError, match=f"{new} and its old name {old} have different values; unset {old}"):
        load_settings()


@pytest.mark.parametrize(("old", "new", "name"), RENAMED)
def test_invalid_value_of_an_old_name_is_refused(monkeypatch, old, new, name):
    monkeypatch.setenv(old, "canary")
    with pytest.raises(InvalidSettingsError, match=new) as caught:
        load_settings()
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(("old", "new", "name"), RENAMED)
def test_options_go_before_the_old_name_of_a_setting(monkeypatch, old, new, name):
    monkeypatch.setenv(old, "7")
    assert getattr(load_settings(**{name: 9}), name) == 9


def test_all_problems_are_reported_at_once_without_values(monkeypatch):
    monkeypatch.setenv("ROCKET_LEASE_SECONDS", "canary1")
    monkeypatch.setenv("ROCKET_DATABASE_URL", "mysql://canary2@h")
    with pytest.raises(InvalidSettingsError) as caught:
        load_settings()
    assert "ROCKET_LEASE_SECONDS" in str(caught.value)
    assert "ROCKET_DATABASE_URL" in str(caught.value)
    assert "canary" not in str(caught.value)


def test_an_empty_variable_counts_as_unset(monkeypatch):
    monkeypatch.setenv("ROCKET_LEASE_SECONDS", "")
    assert load_settings().lease_seconds == 60


def test_command_line_options_override_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("ROCKET_DATA_DIR", "/elsewhere")
    assert load_settings(data_dir=tmp_path).data_dir == tmp_path


@pytest.mark.parametrize("url", ["postgres://u:pw@h/n", "postgresql://u:pw@h/n", "postgresql+psycopg://u:pw@h/n"])
def test_every_postgres_url_uses_psycopg(url):
    assert Settings(database_url=url).database.drivername == "postgresql+psycopg"
    assert Settings(database_url=url).database.password == "p" + "w"


def test_secrets_are_not_shown(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary1")
    settings = Settings(database_url="postgresql://u:canary2@h/n", broker_url="redis://:canary3@h")
    assert "canary" not in repr(settings) + str(settings) + settings.model_dump_json()
    assert set(settings.secrets()) == {"canary1", "canary2", "canary3"}


def test_the_encryption_key_is_not_shown():
    settings = Settings(secret_key=KEY)
    assert KEY not in repr(settings) + settings.model_dump_json()
    assert settings.secrets() == (KEY,)


def test_hosts_are_split_stripped_and_lowercased():
    assert Settings(allowed_hosts=" Rocket.Example, other ,").hosts == {"rocket.example", "other"}


def test_three_heartbeats_fit_into_a_lease():
    settings = Settings(lease_seconds=8)
    assert 3 * settings.heartbeat_seconds < settings.lease_seconds


def test_every_setting_has_a_description():
    assert all(row.meaning for row in describe())


CHOSEN = {
    "models_dir": "models with a space",
    "datasets_dir": "d",
    "database_url": "postgresql://u:p%40:w@h:5432/n?sslmode=require",
    "broker_url": "redis://:secret@h:6379/1",
    "max_attempts": 7,
    "lease_seconds": 1 / 3 + 2,
    "log_format": "json",
    "hf_token": "hf_secret",
}


@pytest.mark.parametrize("chosen", [{}, CHOSEN])
def test_settings_survive_a_round_trip_through_the_environment(monkeypatch, tmp_path, chosen):
    settings = load_settings(data_dir=tmp_path / "data", **chosen)
    environment = settings.environment()
    # A setting that is not set must not become the text `None`.
    assert "None" not in environment.values()
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir("/")
    assert load_settings() == settings
    assert load_settings().secrets() == settings.secrets()
    assert set(environment) <= {row.variable for row in describe()}


def test_trusted_proxies_are_addresses_and_networks():
    settings = Settings(trusted_proxies="127.0.0.1, 10.1.0.0/16,fd00::/8, ::1")
    assert [str(network) for network in settings.proxies] == ["127.0.0.1/32", "10.1.0.0/16", "fd00::/8", "::1/128"]
    assert Settings().proxies == ()
