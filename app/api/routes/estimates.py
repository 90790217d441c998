"""`/estimates`: the estimated resources of a job, without creating one."""

from fastapi import APIRouter

from app.api.dependencies import JSON_BODY, AdmissionDep, ContextDep, HubTokenDep, OwnerDep
from app.api.json_bodies import JsonRoute
from app.api.problems import problems
from app.services import estimates
from app.services.estimates import Estimate
from app.shared.requests import CompressionRequest

router = APIRouter(prefix="/estimates", tags=["estimates"], route_class=JsonRoute)


@router.post("", dependencies=[JSON_BODY], responses=problems(400, 404, 409, 413, 415, 422, 503))
async def make_estimate(
    body: CompressionRequest, context: ContextDep, owner: OwnerDep, threads: AdmissionDep, hub_token: HubTokenDep
) -> Estimate:
    """Check a request as `POST /jobs` does, and estimate its needs from the model's config.json and weight headers."""
    return await threads.run(estimates.make_estimate, context, owner, body, hub_token)
