"""Empty databases of either kind, and one that an earlier version has filled."""

import pytest
from sqlalchemy import create_engine


@pytest.fixture
def url(database_kind, tmp_path, request):
    """Yield the URL of an empty database; on SQLite not even the folder of its file exists."""
    if database_kind == "sqlite":
        yield f"sqlite+pysqlite:///{tmp_path / 'new folder' / 'rocket.sqlite3'}"
        return
    server = request.getfixturevalue("postgres")
    name = server.create()
    yield server.url(name)
    server.drop(name)


@pytest.fixture
def connect(url):
    """Yield a function for transactions that are independent of the application."""
    engine = create_engine(url)
    yield engine.begin
    engine.dispose()
