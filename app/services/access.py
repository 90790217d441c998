"""Authentication: who sends a request, and for which tenant.

Beyond the loopback, every request needs a key. On the loopback, as long as no key was ever created, all requests are
those of the tenant `local`. From the first key on, a key is needed there too, even once the last one has expired or
was revoked: revoking a key is not meant to open access to everyone.
"""

import hashlib
import ipaddress
import logging
import shlex
import socket
from contextlib import closing
from dataclasses import dataclass

from app.shared.database import Database
from app.shared.errors import AppError, InvalidSettingsError, PermissionDeniedError, UnauthenticatedError
from app.shared.models import LOCAL_OWNER
from app.shared.repositories import keys, sessions
from app.shared.repositories.keys import SCOPES, Scope
from app.shared.settings import DEFAULT_DATA_DIR, Settings

_BEARER = "bearer"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """The authenticated sender of a request.

    Attributes:
        tenant: the tenant that the request is made for.
        scopes: what the caller may do.
        key_id: the key used; None on a loopback without keys.
        csrf: token that forms sent with the caller's cookie must contain; None for a caller without a cookie.
        session_id: the session of the cookie; None without a cookie.
    """

    tenant: str
    scopes: frozenset[str]
    key_id: str | None
    csrf: str | None = None
    session_id: str | None = None

    def check_scope(self, scope: Scope) -> None:
        """Raise an error if the caller's key lacks a scope.

        Raises:
            PermissionDeniedError: the key lacks the scope.
        """
        if scope not in self.scopes:
            raise PermissionDeniedError(f"this API key lacks the scope `{scope}`; use one that has it")


LOCAL_CALLER = Caller(tenant=LOCAL_OWNER, scopes=frozenset(SCOPES), key_id=None)


def authenticate(database: Database, authorization: str | None, *, is_local: bool) -> Caller:
    """Return the sender of a request, given its `Authorization` header.

    Args:
        database: the database with the keys.
        authorization: the header; None if it is missing.
        is_local: whether the service listens on the loopback only and the request arrived over it.

    Raises:
        UnauthenticatedError: a key is needed and missing, or not valid.
        DatabaseUnavailableError: the keys cannot be read.
    """
    if authorization is None:
        if is_local:
            with database.snapshot() as session:
                if not keys.has_keys(session):
                    return LOCAL_CALLER
        raise UnauthenticatedError("this server requires an API key; send `Authorization: Bearer rk_...`")
    scheme, _, text = authorization.partition(" ")
    row = None
    if scheme.lower() == _BEARER:
        with database.snapshot() as session:
            row = keys.find_key(session, text.strip())
            is_use_due = row is not None and keys.is_use_due(session, row)
    if row is None:
        raise UnauthenticatedError("the API key is unknown, expired or revoked")
    if is_use_due:
        _note_use(database, row.id)
    return Caller(tenant=row.tenant, scopes=frozenset(row.scopes.split()), key_id=row.id)


def authenticate_session(database: Database, token: str) -> Caller | None:
    """Return the caller that a session cookie belongs to; None if the session or its key is no longer valid.

    Raises:
        DatabaseUnavailableError: the keys cannot be read.
    """
    with database.snapshot() as session:
        record = sessions.find_session(session, token)
    if record is None:
        return None
    opened, key = record
    return Caller(
        tenant=key.tenant,
        scopes=frozenset(key.scopes.split()),
        key_id=key.id,
        csrf=_csrf_token(token),
        session_id=opened.id,
    )


def _csrf_token(token: str) -> str:
    # Shown in pages; does not reveal the session's token.
    return hashlib.sha256(f"csrf:{token}".encode()).hexdigest()


def is_loopback(address: str) -> bool:
    """Return whether an address to listen on can be reached from this machine only.

    Args:
        address: an IP address, or a name, all of whose addresses must be on the loopback.
    """
    if not address:
        # An empty address means all addresses.
        return False
    try:
        entries = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(is_loopback_ip(str(entry[4][0])) for entry in entries)


def parse_ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an IP address, as IPv4 where it is mapped (`::ffff:127.0.0.1` is 127.0.0.1); None for a name."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback_ip(text: str) -> bool:
    """Return whether this is an IP address on the loopback; False for a name."""
    address = parse_ip(text)
    return address is not None and address.is_loopback


def check_safe_binding(settings: Settings, address: str) -> None:
    """Refuse to listen where other machines can connect while no API key exists.

    Args:
        settings: settings of the service; the database must be at the current schema.
        address: the address that the service is to listen on.

    Raises:
        InvalidSettingsError: no usable key exists; the message has the command that creates one.
        DatabaseUnavailableError: the keys cannot be read.
    """
    if is_loopback(address):
        return
    with closing(Database(settings.database)) as database, database.snapshot() as session:
        if keys.has_usable_keys(session):
            return
    is_elsewhere = settings.database_url is None and settings.data_dir != DEFAULT_DATA_DIR.absolute()
    folder = f" --data-dir {shlex.quote(str(settings.data_dir))}" if is_elsewhere else ""
    raise InvalidSettingsError(
        f"{address or 'every address'} can be reached from other machines, and no API key exists to authenticate "
        f"their requests; create one with `rocket admin keys create TENANT{folder}`, or listen on 127.0.0.1"
    )


def _note_use(database: Database, key_id: str) -> None:
    # Useful to know, but no reason to refuse the request.
    try:
        with database.transaction() as session:
            keys.note_use(session, key_id)
    except AppError as error:
        _log.warning("cannot note the use of a key: %s", error)
