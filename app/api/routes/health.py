"""`/healthz` and `/readyz`: health checks."""

from http import HTTPStatus
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict

from app.api.problems import RETRY_AFTER_SECONDS, problem, problems
from app.services import health

router = APIRouter(tags=["health"])


class Alive(BaseModel):
    """The process is alive."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    status: Literal["ok"] = "ok"
    """always `ok`."""


class Ready(Alive):
    """The service can accept jobs."""

    broker: str
    """`ok`, `in this process`, or that the broker is unreachable and workers find their jobs by polling."""


@router.get("/healthz", responses=problems())
async def is_alive() -> Alive:
    """Report whether the process is alive."""
    return Alive()


@router.get("/readyz", response_model=Ready, responses=problems(503))
def is_ready(request: Request) -> Ready | Response:
    """Report whether jobs can be accepted, and what is missing; responds within seconds even if a dependency hangs."""
    checks = request.app.state.health
    assert isinstance(checks, health.Health)
    readiness = checks.check()
    if not readiness.missing:
        return Ready(broker=readiness.broker)
    missing = list(readiness.missing)
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
    return problem(
        request,
        HTTPStatus.SERVICE_UNAVAILABLE,
        "not_ready",
        "; ".join(missing),
        headers=headers,
        missing=missing,
        broker=readiness.broker,
    )
