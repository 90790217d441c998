"""`/healthz` and `/readyz`: for whoever keeps the service running."""

from http import HTTPStatus
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from app.api.dependencies import ContextDep
from app.api.errors import RETRY_AFTER_SECONDS, problem, problems
from app.services.health import missing_dependencies

router = APIRouter(tags=["health"])


class Health(BaseModel):
    """All is well."""

    status: Literal["ok"] = "ok"


@router.get("/healthz", responses=problems())
def is_alive() -> Health:
    """Whether the process answers."""
    return Health()


@router.get("/readyz", response_model=Health, responses=problems(503))
def is_ready(request: Request, context: ContextDep) -> Health | Response:
    """Whether jobs can be accepted."""
    missing = missing_dependencies(context)
    if not missing:
        return Health()
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
    return problem(
        request, HTTPStatus.SERVICE_UNAVAILABLE, "not_ready", "; ".join(missing), headers=headers, missing=missing
    )
