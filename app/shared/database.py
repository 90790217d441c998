"""The database: engine, transactions, clock and migrations.

Alembic is imported only where it is used, as the process of a job does not need it.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, CursorResult, DateTime, Engine, create_engine, event, func, make_url, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine.interfaces import DBAPIConnection, Dialect
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import DeclarativeBase, Session, sessionmaker
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.types import TypeDecorator

from app.shared.errors import DatabaseUnavailableError, DiskFullError

if TYPE_CHECKING:
    from alembic.config import Config

# How long a transaction waits for another writer of the SQLite file, in seconds.
_BUSY_SECONDS = 15.0
_CONNECT_SECONDS = 5
# In addition to the pool's 5, for the threads of the web side. Several processes share a server, but not a file.
_SQLITE_OVERFLOW = 35
_POSTGRES_OVERFLOW = 15
# Key of Postgres' advisory lock; an arbitrary number that must not change.
_MIGRATION_LOCK = 7_625_384
_READ_ONLY = "rocket_read_only"
_CLOCK = "rocket_clock"


class UtcDateTime(TypeDecorator[datetime]):
    """An instant in UTC, in Python and in the database; SQLite has no time zones and would return naive values."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert a value for the database."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a datetime must have a time zone")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """Convert a value from the database."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Database:
    """A database, SQLite or Postgres, and the only way to open a transaction.

    Args:
        url: URL of the database.
        clock: returns seconds since the epoch; None uses the database's clock on Postgres, where several machines must
            agree on one, and this machine's on SQLite. For tests.
    """

    def __init__(self, url: URL | str, *, clock: Callable[[], float] | None = None) -> None:
        self.url = make_url(url)
        self.engine = _create_engine(self.url)
        reader = self.engine.execution_options(**{_READ_ONLY: True}, **_snapshot_options(self.url))
        # Updates and deletions change rows alone, and not the objects in a session, which are read anew where needed.
        options = {"synchronize_session": False}
        self._sessions, self._readers = (
            sessionmaker(bind, expire_on_commit=False, info={_CLOCK: clock}, execution_options=options)
            for bind in (self.engine, reader)
        )

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Open a writing transaction: committed at the end of the block, rolled back if it raises.

        Raises:
            DatabaseUnavailableError: the database cannot be reached or stays locked.
            DiskFullError: the database's disk is full.
        """
        with _database_errors(), self._sessions.begin() as session:
            yield session

    @contextmanager
    def snapshot(self) -> Iterator[Session]:
        """Open a read-only transaction with a consistent snapshot; it does not wait for writers.

        Raises:
            DatabaseUnavailableError: the database cannot be reached.
        """
        with _database_errors(), self._readers.begin() as session:
            yield session

    def is_current(self) -> bool:
        """Return whether the schema is that of this version of the code.

        Raises:
            DatabaseUnavailableError: the database cannot be reached.
        """
        from alembic.runtime.migration import MigrationContext
        from alembic.script import ScriptDirectory

        with _database_errors(), self.engine.connect() as connection:
            heads = MigrationContext.configure(connection).get_current_heads()
        return set(heads) == set(ScriptDirectory.from_config(_alembic(self.url)).get_heads())

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def now(session: Session) -> datetime:
    """Return the time that leases and retention are based on."""
    clock = session.info[_CLOCK]
    if clock is None and session.get_bind().dialect.name == "postgresql":
        # Not `now()`, which does not advance during a transaction.
        return session.execute(select(func.clock_timestamp(type_=UtcDateTime))).scalar_one()
    return datetime.fromtimestamp(time.time() if clock is None else clock(), UTC)


def change_rows(session: Session, statement: UpdateBase) -> int:
    """Execute an update or a deletion; return the number of its rows."""
    result = session.execute(statement)
    assert isinstance(result, CursorResult)
    return result.rowcount


def insertion(session: Session, table: type[DeclarativeBase]) -> postgresql.Insert | sqlite.Insert:
    """Return an insertion that can say what to do about a row with the same key."""
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    return insert(table)


def insert_if_new(session: Session, table: type[DeclarativeBase], **values: object) -> bool:
    """Insert a row unless there is one with its primary key; return whether it is new."""
    key = table.__table__.primary_key
    statement = insertion(session, table).values(values).on_conflict_do_nothing(index_elements=key).returning(*key)
    return session.execute(statement).one_or_none() is not None


def upgrade(url: URL | str, revision: str = "head") -> None:
    """Migrate the schema to a revision, creating an SQLite file and its folder if needed.

    Raises:
        DatabaseUnavailableError: the database cannot be reached.
    """
    from alembic import command

    location = make_url(url)
    if location.get_backend_name() == "sqlite" and location.database:
        file = Path(location.database)
        file.parent.mkdir(parents=True, exist_ok=True)
        # The database contains requests and hashes of keys, so other users must not read it; SQLite's additional files
        # get the same mode. If the file cannot be created, SQLite reports that.
        with suppress(OSError):
            file.touch(mode=0o600, exist_ok=False)
    _migrate(location, command.upgrade, revision)


def downgrade(url: URL | str, revision: str) -> None:
    """Migrate the schema back to a revision; data of later revisions is lost.

    Raises:
        DatabaseUnavailableError: the database cannot be reached.
    """
    from alembic import command

    _migrate(make_url(url), command.downgrade, revision)


def list_revisions() -> tuple[str, ...]:
    """Return all revisions of the schema, from the first to that of this version."""
    from alembic.script import ScriptDirectory

    directory = ScriptDirectory.from_config(_alembic(make_url("sqlite://")))
    return tuple(reversed([script.revision for script in directory.walk_revisions()]))


def _migrate(url: URL, action: Callable[..., Any], *arguments: str) -> None:
    engine = _create_engine(url)
    is_sqlite = engine.dialect.name == "sqlite"
    if is_sqlite:
        event.listen(engine, "connect", _allow_rebuilding)
    try:
        with _database_errors(), engine.begin() as connection:
            if not is_sqlite:
                # Several processes may migrate at once: the others wait, and then have nothing left to do. On SQLite
                # the transaction itself locks the file.
                connection.execute(select(func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            action(_alembic(url, connection), *arguments)
            if is_sqlite:
                lost = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
                assert not lost, f"the migration leaves {len(lost)} rows that refer to none"
    finally:
        engine.dispose()


def _alembic(url: URL, connection: Connection | None = None) -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(resources.files("migrations")).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    config.attributes["dialect"] = url.get_backend_name()
    return config


def _snapshot_options(url: URL) -> dict[str, Any]:
    # An SQLite transaction is always a snapshot.
    if url.get_backend_name() == "sqlite":
        return {}
    return {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}


def _create_engine(url: URL) -> Engine:
    if url.get_backend_name() != "sqlite":
        # A pooled connection does not survive a restart of the server; checking first costs a round trip.
        return create_engine(
            url, pool_pre_ping=True, max_overflow=_POSTGRES_OVERFLOW, connect_args={"connect_timeout": _CONNECT_SECONDS}
        )
    engine = create_engine(url, max_overflow=_SQLITE_OVERFLOW, connect_args={"timeout": _BUSY_SECONDS})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
    assert isinstance(connection, sqlite3.Connection)
    # Python's own transaction handling would begin too late and never use IMMEDIATE.
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")


def _allow_rebuilding(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
    # SQLite alters a table by rebuilding it; dropping the old one would delete all rows that refer to it. The setting
    # only has an effect outside of a transaction.
    assert isinstance(connection, sqlite3.Connection)
    connection.execute("PRAGMA foreign_keys=OFF")


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads first and then writes fails at once, whatever the timeout, if another one has written in
    # between; so a transaction that may write takes the lock first.
    mode = "DEFERRED" if connection.get_execution_options().get(_READ_ONLY) else "IMMEDIATE"
    connection.exec_driver_sql(f"BEGIN {mode}")


@contextmanager
def _database_errors() -> Iterator[None]:
    try:
        yield
    except OperationalError as error:
        if isinstance(error.orig, sqlite3.Error) and error.orig.sqlite_errorcode == sqlite3.SQLITE_FULL:
            raise DiskFullError("the database's disk is full; free space in the data folder") from error
        raise _unavailable(error) from error
    except PoolTimeoutError as error:
        raise DatabaseUnavailableError("all connections to the database are in use; try again later") from error
    except DBAPIError as error:
        if error.connection_invalidated:
            raise _unavailable(error) from error
        raise


def _unavailable(error: DBAPIError) -> DatabaseUnavailableError:
    return DatabaseUnavailableError(f"the database does not answer ({type(error.orig).__name__}); try again later")
