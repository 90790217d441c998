from tests.service_fixtures import (  # noqa: F401
    _no_server_is_left,
    _no_settings_of_this_machine,
    client,
    connect,
    pytest_generate_tests,
    remote,
    rocket,
    server,
    service,
    stack,
)
