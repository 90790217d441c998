import pytest

from tests.app.api.conftest import Worker, submitted, url  # noqa: F401  # fixtures


@pytest.fixture
def worker(context, profile, factored, report, result, model_profile):
    return Worker(context, profile, factored, report, result, model_profile)


@pytest.fixture
def page(client):
    """Send requests as a browser does."""

    def ask(method, path, **options):
        headers = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"} | options.pop("headers", {})
        return client.request(method, path, headers=headers, follow_redirects=False, **options)

    return ask
