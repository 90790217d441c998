"""The web application."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.staticfiles import StaticFiles

from app.api.application import Application
from app.api.dependencies import BEARER
from app.api.middleware.access import REFUSALS, AccessMiddleware
from app.api.middleware.forwarding import ForwardingMiddleware
from app.api.middleware.metrics import MetricsMiddleware
from app.api.middleware.requests import BodyDeadlineMiddleware, BodyLimitMiddleware, RequestIdMiddleware
from app.api.middleware.shared_links import SharedLinkMiddleware
from app.api.paths import PAGES, STATIC
from app.api.problems import ERROR_HANDLERS, install_error_handlers, problems
from app.api.routes import (
    artifacts,
    calibrations,
    estimates,
    events,
    health,
    jobs,
    links,
    metrics,
    models,
    profiles,
    webhooks,
    works,
)
from app.api.streams import Streams
from app.api.tenant_shares import SharedThreads
from app.api.uploaded_bodies import UploadReceiver
from app.pages import api_browser, api_keys, compare, downloads, new_job, sign_in
from app.pages import jobs as pages_of_jobs
from app.pages import links as pages_of_links
from app.pages import models as pages_of_models
from app.pages import profiles as pages_of_profiles
from app.pages import webhooks as pages_of_webhooks
from app.pages import works as pages_of_works
from app.pages.forms import CSRF
from app.pages.rendering import problem_page
from app.services.admission import template_kept
from app.services.context import open_context
from app.services.health import Health
from app.services.metrics import ServiceCollector
from app.services.proxies import TrustedProxies
from app.services.sessions import FailureBudget
from app.shared.metrics import HttpMetrics, create_registry
from app.shared.settings import Settings

# Requests with larger bodies than others.
UPLOADS = (("POST", calibrations.BODY_PATH), ("PUT", models.PIECE_PATH))
# Threads share an interpreter with the event loop, which waits for each busy one; more would not answer sooner.
_REQUEST_THREADS = 16
# Separate from the threads of other requests, so that a hanging store cannot exhaust those.
_DOWNLOAD_THREADS = 32
_DOWNLOAD_THREADS_OF_A_TENANT = 8
# For judging models, which may query a slow Hub.
_ADMISSION_THREADS = 40
_ADMISSION_THREADS_OF_A_TENANT = 3


def create_app(
    settings: Settings,
    *,
    registry: CollectorRegistry | None = None,
    address: str = "127.0.0.1",
    on_queued: Callable[[], None] = lambda: None,
) -> FastAPI:
    """Return the application for these settings; the database must be at the current schema.

    Args:
        settings: the operator's settings.
        registry: metrics to serve next to the application's own, e.g. those of a worker in the same process.
        address: IP address or name that it will listen on; beyond the loopback, every request needs a key.
        on_queued: called by a request's thread when a job is queued; must not wait for a broker.

    Raises:
        InvalidSettingsError: a package that the artifact store needs is not installed.
        StorageError: the data folder or the artifact store cannot be used.
    """
    context = open_context(settings, on_queued)
    registry = create_registry() if registry is None else registry
    registry.register(ServiceCollector(context))

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        with template_kept():
            current_default_thread_limiter().total_tokens = _REQUEST_THREADS
            yield
        context.database.close()

    app = Application(lifespan=lifespan)
    app.state.context = context
    app.state.streams = Streams(settings.max_streams, share=settings.tenant_streams)
    app.state.health = Health(context)
    app.state.metrics = registry
    app.state.downloads = SharedThreads(_DOWNLOAD_THREADS, share=_DOWNLOAD_THREADS_OF_A_TENANT)
    app.state.admissions = SharedThreads(_ADMISSION_THREADS, share=_ADMISSION_THREADS_OF_A_TENANT)
    app.state.upload_receiver = UploadReceiver(settings)
    app.state.sign_in_failures = FailureBudget()
    app.include_router(health.router)
    for part in (jobs, events, artifacts, links, works, profiles, estimates, calibrations, models, webhooks, metrics):
        app.include_router(part.router, dependencies=[BEARER], responses=problems(*REFUSALS))
    app.state.problem_page = problem_page
    # For the pages: a session counts below their path only, and with the token that their forms have.
    for part in (calibrations, models):
        app.include_router(part.router, prefix=PAGES, dependencies=[CSRF], include_in_schema=False)
    pages = (pages_of_jobs, pages_of_links, downloads, new_job, pages_of_profiles, pages_of_models, compare)
    for page in (*pages, pages_of_works, pages_of_webhooks, api_keys, api_browser, sign_in):
        app.include_router(page.router)
    app.mount(STATIC, StaticFiles(packages=[("app.pages", "static"), ("rocket_core.report", "static")]))
    # Middleware added last sees a request first.
    exceptions = ((method, path, settings.max_upload_bytes) for method, path in UPLOADS)
    app.add_middleware(BodyLimitMiddleware, max_bytes=settings.max_body_bytes, exceptions=tuple(exceptions))
    app.add_middleware(BodyDeadlineMiddleware, seconds=settings.body_seconds, min_rate=settings.min_body_rate)
    app.add_middleware(AccessMiddleware, context=context, address=address)
    app.add_middleware(ExceptionMiddleware, handlers=ERROR_HANDLERS)
    app.add_middleware(SharedLinkMiddleware)
    app.add_middleware(MetricsMiddleware, metrics=HttpMetrics(registry))
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(ForwardingMiddleware, proxies=TrustedProxies(settings.proxies))
    install_error_handlers(app)
    return app
