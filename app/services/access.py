"""Who comes in, and as which tenant.

Beyond the loopback nobody comes in without a key. On it, as long as no key was ever made, everybody is the one tenant
`local`; from the first key on, a key is needed there too, even once the last one has expired or was revoked: who takes
a key away does not mean to let everybody in.
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
    """Who sends a request.

    Attributes:
        tenant: as whom.
        scopes: what the caller may do.
        key_id: the key that proves it; None on a loopback without keys.
        csrf: what a form must hold that comes with the caller's cookie; None of who came in without one.
        session_id: the session of the cookie; None without one.
    """

    tenant: str
    scopes: frozenset[str]
    key_id: str | None
    csrf: str | None = None
    session_id: str | None = None

    def require_scope(self, scope: Scope) -> None:
        """Refuses what the caller's key is not for.

        Raises:
            PermissionDeniedError: the key lacks the scope.
        """
        if scope not in self.scopes:
            raise PermissionDeniedError(f"this API key lacks the scope `{scope}`; use one that has it")


LOCAL_CALLER = Caller(tenant=LOCAL_OWNER, scopes=frozenset(SCOPES), key_id=None)


def authenticate(database: Database, authorization: str | None, *, is_local: bool) -> Caller:
    """Who sends a request, by its `Authorization` header.

    Args:
        database: the rows.
        authorization: the header; None if there is none.
        is_local: whether the service listens on the loopback only and the request came over it.

    Raises:
        UnauthenticatedError: no key where one is needed, or none that is valid.
        DatabaseUnavailableError: the keys cannot be read.
    """
    if authorization is None:
        if is_local:
            with database.snapshot() as session:
                if not keys.has_keys(session):
                    return LOCAL_CALLER
        raise UnauthenticatedError("this server wants an API key, as `Authorization: Bearer rk_...`")
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
    """Return who has signed in to the pages, by the cookie; None if the session or its key is no longer valid.

    Raises:
        DatabaseUnavailableError: the keys cannot be read.
    """
    with database.snapshot() as session:
        found = sessions.find_session(session, token)
    if found is None:
        return None
    opened, key = found
    return Caller(
        tenant=key.tenant,
        scopes=frozenset(key.scopes.split()),
        key_id=key.id,
        csrf=_csrf_token(token),
        session_id=opened.id,
    )


def _csrf_token(token: str) -> str:
    # A page shows it, and it does not tell the token of the session.
    return hashlib.sha256(f"csrf:{token}".encode()).hexdigest()


def is_loopback(address: str) -> bool:
    """Whether an address to listen on can be reached from this machine only.

    Args:
        address: an IP address, or a name, of which every address must be on the loopback.
    """
    if not address:
        # To the system that is every address there is.
        return False
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(is_loopback_ip(str(entry[4][0])) for entry in found)


def parse_ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An IP address, in its older form where it has one (`::ffff:127.0.0.1` is 127.0.0.1); None of what is a name."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback_ip(text: str) -> bool:
    """Whether this is an IP address on the loopback; a name is none."""
    address = parse_ip(text)
    return address is not None and address.is_loopback


def require_safe_binding(settings: Settings, address: str) -> None:
    """Refuses to listen where other machines could knock as long as nobody has a key.

    Args:
        settings: of the service; the database must have been upgraded.
        address: what the service shall listen on.

    Raises:
        InvalidSettingsError: with the command that makes a key.
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
        f"{address or 'every address'} can be reached from other machines, and there is no API key, so that nobody "
        f"could come in; make one with `rocket admin keys create TENANT{folder}`, or listen on 127.0.0.1"
    )


def _note_use(database: Database, key_id: str) -> None:
    # Good to know, but no reason to turn somebody away.
    try:
        with database.transaction() as session:
            keys.note_use(session, key_id)
    except AppError as error:
        _log.warning("cannot note the use of a key: %s", error)
