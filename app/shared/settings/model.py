"""The settings of the service as one class that rejects invalid values."""

import ipaddress
from base64 import urlsafe_b64decode
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import limits
from pydantic import AfterValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from app.shared.requests import Queue
from app.shared.settings.networks import Network, parse_networks

PREFIX = "ROCKET_"
DEFAULT_DATA_DIR = Path("rocket-data")

_DRIVERS = {
    "sqlite": "sqlite+pysqlite",
    "sqlite+pysqlite": "sqlite+pysqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}
_BROKERS = ("memory://", "redis://", "rediss://")
_MIB = 2**20
_KEY_BYTES = 32


def _absolute(path: Path) -> Path:
    # The child process runs in another working directory.
    return path.expanduser().absolute()


def _known_database(secret: SecretStr) -> SecretStr:
    try:
        url = make_url(secret.get_secret_value())
    except ArgumentError:
        raise ValueError(
            "is not a database URL; write sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME"
        ) from None
    if url.drivername not in _DRIVERS:
        raise ValueError("names a database that is not supported; use sqlite or postgresql")
    if url.drivername.startswith("sqlite") and url.database in {None, "", ":memory:"}:
        raise ValueError("is an SQLite database in memory, which job processes cannot see; name a file")
    return SecretStr(url.set(drivername=_DRIVERS[url.drivername]).render_as_string(hide_password=False))


def _known_broker(secret: SecretStr) -> SecretStr:
    if not secret.get_secret_value().startswith(_BROKERS):
        raise ValueError(f"names a broker that is not supported; use one of {', '.join(_BROKERS)}")
    return secret


def _known_store(url: str) -> str:
    parts = urlsplit(url)
    is_folder = parts.scheme == "file" and not parts.netloc and len(parts.path) > 1
    is_bucket = parts.scheme == "s3" and parts.netloc and not parts.username
    if not is_folder and not is_bucket:
        raise ValueError("is not a storage URL; write file:///FOLDER or s3://BUCKET/PREFIX, without credentials")
    return url


def _is_endpoint(url: str) -> str:
    if urlsplit(url).scheme not in {"http", "https"} or not urlsplit(url).hostname:
        raise ValueError("is not a server URL; write http://HOST:PORT or https://HOST")
    return url


def _is_key(secret: SecretStr) -> SecretStr:
    with suppress(ValueError):
        if len(urlsafe_b64decode(secret.get_secret_value())) == _KEY_BYTES:
            return secret
    raise ValueError(
        "is not a key; create one with: python3 -c 'import base64, os; "
        "print(base64.urlsafe_b64encode(os.urandom(32)).decode())'"
    )


def _is_address(address: str) -> str:
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        raise ValueError("is not an IP address; write 127.0.0.1, or 0.0.0.0 for all networks") from None


def _is_list_of_networks(text: str) -> str:
    parse_networks(text)
    return text


def _is_rate(rate: str) -> str:
    try:
        limits.parse(rate)
    except ValueError:
        raise ValueError("is not a rate; write something like 100/minute") from None
    return rate


_Folder = Annotated[Path, AfterValidator(_absolute)]
_Rate = Annotated[str, AfterValidator(_is_rate)]


class Settings(BaseSettings):
    """Settings of the operator. Each field is read from `ROCKET_` and its name in capitals.

    The string literal below a field is its line in the reference.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        env_ignore_empty=True,
        populate_by_name=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    data_dir: _Folder = DEFAULT_DATA_DIR
    """folder of everything the service writes: database, artifacts, work"""
    models_dir: _Folder | None = None
    """folder whose subfolders are offered as `local/NAME`; default `<data-dir>/models`"""
    datasets_dir: _Folder | None = None
    """folder whose files are offered as calibration `local/FILE`; default `<data-dir>/datasets`"""
    database_url: Annotated[SecretStr, AfterValidator(_known_database)] | None = None
    """`sqlite:///FILE` or `postgresql://USER:PASSWORD@HOST/NAME`; default a file in the data folder"""
    broker_url: Annotated[SecretStr, AfterValidator(_known_broker)] = SecretStr("memory://")
    """`memory://` (workers in the same process) or `redis://HOST`; jobs themselves are in the database"""
    storage_url: Annotated[str, AfterValidator(_known_store)] | None = None
    """where artifacts and uploads are stored: `file:///FOLDER` or `s3://BUCKET/PREFIX`, with credentials configured as
    for the AWS tools; default a folder in the data folder"""
    s3_endpoint_url: Annotated[str, AfterValidator(_is_endpoint)] | None = None
    """URL of an S3-compatible store that is not Amazon's"""
    redirect_downloads: bool = False
    """redirect clients to presigned URLs of S3 instead of proxying files"""
    secret_key: Annotated[SecretStr, AfterValidator(_is_key)] | None = None
    """32 random bytes as URL-safe base 64, the same for all processes; encrypts Hub tokens that come with jobs, and the
    keys of webhooks; default a file in the data folder"""
    allowed_hosts: str = ""
    """names under which clients reach the service, separated by commas; this machine's loopback names are always among
    them"""
    trusted_proxies: Annotated[str, AfterValidator(_is_list_of_networks)] = ""
    """IP addresses and networks of reverse proxies, separated by commas; only from these are `X-Forwarded-For` and
    `X-Forwarded-Proto` accepted; default none"""
    default_queue: Queue = "cpu"
    """queue of jobs that name none: `cpu` or `gpu`; `rocket serve` works on both"""
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 5
    """number of attempts at a job before it fails permanently"""
    lease_seconds: Annotated[float, Field(ge=2, le=3600)] = 60.0
    """silence after which a worker is considered dead; it renews its leases four times as often"""
    poll_seconds: Annotated[float, Field(ge=0.05, le=60)] = 1.0
    """interval at which workers look for jobs and the reconciler sweeps"""
    help_jobs: bool = False
    """let a worker without a job work on blocks of jobs that run on others; all must share the data folder"""
    notify_seconds: Annotated[float, Field(ge=1, le=3600)] = 30.0
    """time after which the workers are notified of a queued job again"""
    retry_backoff_seconds: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """delay before the second attempt at a job; doubles with each further one"""
    cancel_grace_seconds: Annotated[float, Field(ge=0, le=600)] = 30.0
    """time a job gets to stop by itself before its process is killed"""
    stall_seconds: Annotated[float, Field(ge=1, le=7 * 86400)] = 3600.0
    """time without any progress after which a job's process is killed"""
    artifact_retention_days: Annotated[float, Field(gt=0, le=3650)] = 7.0
    """days that artifacts can be downloaded after the job has succeeded"""
    job_retention_days: Annotated[float, Field(gt=0, le=36500)] | None = None
    """days after which a job that has ended is deleted with all its rows; default never"""
    profile_retention_days: Annotated[float, Field(gt=0, le=36500)] | None = None
    """days after which a layer profile that no job has used is deleted; default never"""
    profile_cache_bytes: Annotated[int, Field(ge=0)] = 64 * 2**30
    """disk space on each worker to cache layer profiles and calibration statistics, so that later jobs on the same
    model skip the calibration; the least recently used are evicted"""
    hub_cache_bytes: Annotated[int, Field(ge=1)] | None = None
    """disk space for Hub models in the workers' cache (`HF_HOME`); the least recently used that no job needs are
    evicted; default no limit, as other programs may share the cache"""
    idempotency_hours: Annotated[float, Field(gt=0, le=720)] = 24.0
    """hours for which an `Idempotency-Key` is stored"""
    max_body_bytes: Annotated[int, Field(ge=1024, le=64 * _MIB)] = _MIB
    """largest request body accepted"""
    max_streams: Annotated[int, Field(ge=1, le=10_000)] = 64
    """event streams and waiting requests open at once; further streams are refused, and further requests do not wait"""
    max_connections_per_address: Annotated[int, Field(ge=1)] = 256
    """connections that one client address (IPv6: /64 network) may have open; a further one closes the oldest idle one,
    and is refused if none is idle; trusted proxies are exempt"""
    head_seconds: Annotated[float, Field(ge=0.1, le=3600)] = 10.0
    """time in which a client must send the head of a request, from connecting or from its first byte"""
    body_seconds: Annotated[float, Field(ge=0.1, le=3600)] = 30.0
    """silence after which a client that has not sent all of a request's body is refused (408)"""
    min_body_rate: Annotated[int, Field(ge=0)] = 1024
    """bytes per second that a client must send of a body on average once half of `ROCKET_BODY_SECONDS` has passed; 0
    for no minimum"""
    send_seconds: Annotated[float, Field(ge=0.1, le=3600)] = 60.0
    """time without progress after which a client that does not read its response is cut off"""
    max_tenant_streams: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """event streams and waiting requests of one tenant open at once, if API keys exist; default a quarter of
    `ROCKET_MAX_STREAMS`"""
    max_active_jobs: Annotated[int, Field(ge=1)] = 100
    """quota of a tenant: jobs that have not ended"""
    max_stored_bytes: Annotated[int, Field(ge=1)] | None = None
    """quota of a tenant: artifacts, uploads and uploaded models; default none"""
    max_model_bytes: Annotated[int, Field(ge=1)] | None = None
    """quota of a tenant: weights of one model; default none"""
    max_calibration_tokens: Annotated[int, Field(ge=1)] = 2**24
    """quota of a tenant: calibration tokens of one job"""
    measure_energy: bool = True
    """measure the energy of each stage of a job, by codecarbon and without a network"""
    max_upload_bytes: Annotated[int, Field(ge=1024)] = 64 * _MIB
    """largest calibration file that can be uploaded, and largest piece of a model"""
    max_concurrent_uploads: Annotated[int, Field(ge=1, le=64)] = 2
    """uploads of one tenant received at once by one process, if API keys exist"""
    upload_seconds: Annotated[float, Field(ge=1, le=86400)] = 900.0
    """time in which an upload must have arrived"""
    max_uploads: Annotated[int, Field(ge=0)] = 100
    """quota of a tenant: calibration files uploaded"""
    max_models: Annotated[int, Field(ge=0)] = 20
    """quota of a tenant: models uploaded; 0 to allow none"""
    unfinished_model_hours: Annotated[float, Field(gt=0, le=8760)] = 48.0
    """hours without a new piece after which the incomplete upload of a model is deleted"""
    model_retention_days: Annotated[float, Field(gt=0, le=36500)] | None = None
    """days after which an uploaded model that no job has used is deleted; default never"""
    tenants_manage_keys: bool = False
    """let users who are signed in with a key that may write create and revoke the API keys of their tenant on the page
    `/ui/keys`; a new key gets no scope that theirs lacks, and is revoked with it"""
    max_webhooks: Annotated[int, Field(ge=0)] = 10
    """quota of a tenant: webhooks; 0 to allow none"""
    webhooks_allow_private: bool = False
    """send webhooks also over plain HTTP and into private networks, including this machine; anyone with a key can then
    make workers send requests there"""
    max_profiles: Annotated[int, Field(ge=1)] = 100
    """quota of a tenant: layer profiles; no job is refused because of it, as the least recently used are evicted"""
    rate_limit: _Rate = "1200/minute"
    """requests of a tenant, or of an address if no API keys exist"""
    submit_rate_limit: _Rate = "120/minute"
    """jobs, estimates and uploads of a tenant"""
    isolation: Literal["auto", "required", "bubblewrap", "landlock", "container"] = "auto"
    """how the processes that read models are confined: `bubblewrap`, `landlock`, or, in its own container,
    `container`; `auto` takes the strongest that works here, and a worker warns of what the system does not restrict;
    with `required`, or if one is named, it refuses to run instead"""
    preload_library: bool = True
    """keep a process on each worker that has imported torch and the library, from which jobs start in a fraction of a
    second instead of several seconds; it takes about 400 MiB while no job runs; Linux only"""
    max_job_memory_bytes: Annotated[int, Field(ge=2**30)] | None = None
    """memory of one job's process; default 4 GiB and twice what the job is estimated to need"""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """port of a worker's metrics; default none, as the API of `rocket serve` includes them"""
    metrics_host: Annotated[str, AfterValidator(_is_address)] = "127.0.0.1"
    """address that a worker serves its metrics on; anyone who can reach it reads them without a key"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """lowest severity logged"""
    log_format: Literal["text", "json"] = "text"
    """lines for humans or for programs"""
    hf_token: SecretStr | None = Field(default=None, validation_alias="HF_TOKEN")
    """token of the model hub, for private and gated models"""

    @model_validator(mode="after")
    def _store_has_its_settings(self) -> "Settings":
        is_s3 = self.storage_url is not None and self.storage_url.startswith("s3://")
        for name in ("s3_endpoint_url", "redirect_downloads"):
            if getattr(self, name) and not is_s3:
                raise ValueError(f"{variable_of(name)} needs ROCKET_STORAGE_URL to be s3://BUCKET/PREFIX")
        return self

    @property
    def requires_isolation(self) -> bool:
        """Whether a confined process must end if a part of its sandbox does not hold; a container has other limits."""
        return self.isolation not in {"auto", "container"}

    @property
    def hosts(self) -> frozenset[str]:
        """Names under which clients may reach the service, in addition to the loopback's, in lower case."""
        return frozenset(name.strip().lower() for name in self.allowed_hosts.split(",") if name.strip())

    @property
    def proxies(self) -> tuple[Network, ...]:
        """The reverse proxies whose forwarding headers are accepted."""
        return parse_networks(self.trusted_proxies)

    @property
    def models_folder(self) -> Path:
        """Folder of the models offered by name."""
        return self.models_dir or self.data_dir / "models"

    @property
    def datasets_folder(self) -> Path:
        """Folder of the calibration files offered by name."""
        return self.datasets_dir or self.data_dir / "datasets"

    @property
    def database(self) -> URL:
        """The database, with its driver."""
        if self.database_url is not None:
            return make_url(self.database_url.get_secret_value())
        return URL.create(_DRIVERS["sqlite"], database=str(self.data_dir / "rocket.sqlite3"))

    @property
    def broker(self) -> str:
        """The broker's URL, password included."""
        return self.broker_url.get_secret_value()

    @property
    def tenant_streams(self) -> int:
        """Return how many event streams and waiting requests one tenant may have open at once."""
        return self.max_tenant_streams or -(-self.max_streams // 4)

    @property
    def heartbeat_seconds(self) -> float:
        """Time between two heartbeats: three may be lost before the lease expires."""
        return self.lease_seconds / 4

    def environment(self) -> dict[str, str]:
        """Return these settings as environment variables, for a process that must have the same."""
        values = {variable_of(name): getattr(self, name) for name in Settings.model_fields}
        return {
            variable: value.get_secret_value() if isinstance(value, SecretStr) else str(value)
            for variable, value in values.items()
            if value is not None
        }

    def secrets(self) -> tuple[str, ...]:
        """Return the values that must never be logged."""
        chosen = (self.hf_token, self.secret_key)
        passwords = [self.database.password, *(secret.get_secret_value() for secret in chosen if secret is not None)]
        if "@" in self.broker:
            passwords.append(self.broker.split("://", 1)[1].rsplit("@", 1)[0].split(":", 1)[-1])
        return tuple(str(password) for password in passwords if password)


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    alias = Settings.model_fields[name].validation_alias
    return alias if isinstance(alias, str) else PREFIX + name.upper()
