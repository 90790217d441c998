import resource

import pytest

from app.main import create_app
from tests.rocket_cli.service.sockets import Connection, LimitedServer


@pytest.fixture
def serve(service, stack, monkeypatch):
    """Start servers; the limit on descriptors of this process is not changed."""
    monkeypatch.setattr(resource, "setrlimit", lambda *_arguments: None)

    def serve(**settings):
        server = LimitedServer(create_app(service.settings.model_copy(update=settings)))
        stack.callback(server.stop)
        return server

    return serve


@pytest.fixture
def dial(stack):
    def dial(server, **options):
        connection = Connection(server.address, **options)
        stack.callback(connection.close)
        return connection

    return dial
