from tests.service_fixtures import (  # noqa: F401
    _clean_environment,
    _joined_servers,
    client,
    connect,
    pytest_generate_tests,
    remote,
    rocket,
    server,
    service,
    stack,
)
