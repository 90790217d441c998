"""Databases that an earlier version has filled."""

from datetime import UTC, datetime

import pytest
from sqlalchemy import text

from app.shared.database import Database, downgrade, upgrade
from app.shared.models import Base, Job
from tests.migrations.released import AT_0001, fill, read
from tests.migrations.schema import check_migrations

EXPIRY = {
    "job_1": datetime(2026, 3, 8, 11, 30, tzinfo=UTC),
    "job_2": None,
    "job_3": None,
    "job_4": None,
    "job_5": None,
    # Its files were removed already.
    "job_6": datetime(2026, 3, 9, tzinfo=UTC),
}

pytestmark = pytest.mark.databases("sqlite", "postgres")


@pytest.fixture
def filled(url, connect):
    """Fill a database of version 0001, and return the rows of every table."""
    upgrade(url, "0001")
    with connect() as connection:
        fill(connection, AT_0001)
    with connect() as connection:
        return read(connection, AT_0001)


def renamed(artifacts):
    """Return rows of artifacts with today's name of the export `factored`."""
    return sorted(row.replace("'factored/", "'rocket/") for row in artifacts)


def test_every_table_of_the_revision_has_rows(url, connect):
    upgrade(url, "0001")
    with connect() as connection:
        tables = set(connection.dialect.get_table_names(connection))
    assert tables == {*AT_0001, "alembic_version"}
    assert all(AT_0001.values())


def test_an_upgrade_keeps_every_row_and_records_its_revision(url, connect, filled):
    upgrade(url)
    with connect() as connection:
        assert read(connection, AT_0001) == filled | {"artifacts": renamed(filled["artifacts"])}
    database = Database(url)
    with database.snapshot() as session:
        for mapper in Base.registry.mappers:
            # As the application reads them.
            rows = session.query(mapper.class_).all()
            table = mapper.class_.__tablename__
            # The revision gives the database its identity.
            assert len(rows) == (1 if table == "identity" else len(AT_0001.get(table, [])))
        found = {job.id: job for job in session.query(Job)}
    database.close()
    assert {job_id: job.expires_at for job_id, job in found.items()} == EXPIRY
    assert {(job.queue, job.hub_token) for job in found.values()} == {("cpu", None)}
    assert found["job_1"].request["metadata"] == AT_0001["jobs"][0]["request"]["metadata"]
    assert found["job_1"].created_at == datetime(2026, 3, 1, 10, 0, 0, 123456, tzinfo=UTC)
    check_migrations(url)


def test_a_downgrade_and_upgrade_keep_every_row(url, connect, filled):
    upgrade(url)
    downgrade(url, "0001")
    with connect() as connection:
        assert read(connection, AT_0001) == filled
    upgrade(url)
    with connect() as connection:
        assert read(connection, AT_0001) == filled | {"artifacts": renamed(filled["artifacts"])}
        expiries = connection.execute(text("SELECT count(*) FROM jobs WHERE expires_at IS NOT NULL")).scalar_one()
    assert expiries == 2
    check_migrations(url)


def test_deleting_a_job_still_deletes_its_rows(url, connect, filled):
    upgrade(url)
    database = Database(url)
    with database.transaction() as session:
        session.delete(session.get(Job, "job_1"))
    database.close()
    with connect() as connection:
        left = read(connection, AT_0001)
    assert {table for table, rows in left.items() if rows} == {"jobs", "artifacts", "outbox"}
    assert len(left["jobs"]) == len(filled["jobs"]) - 1


def test_a_failed_upgrade_leaves_the_database_unchanged(url, connect, filled, monkeypatch):
    import alembic.op

    def explode(*_arguments, **_options):
        raise RuntimeError("power cut")

    # The last operation of the newest revision.
    monkeypatch.setattr(alembic.op, "execute", explode)
    with pytest.raises(RuntimeError, match="power cut"):
        upgrade(url)
    with connect() as connection:
        assert read(connection, AT_0001) == filled
        tables = set(connection.dialect.get_table_names(connection))
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == "0001"
    assert tables == {*AT_0001, "alembic_version"}
    monkeypatch.undo()
    upgrade(url)
    check_migrations(url)
