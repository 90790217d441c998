"""`/profiles`: predicted sizes and errors of a model at any ratio, before a job is created."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, status

from app.api.acceptance import SubmissionDep, creates_job
from app.api.dependencies import JSON_BODY, ActorDep, ContextDep, OwnerDep
from app.api.ids import AfterProfile, PageSize, is_profile_id
from app.api.json_bodies import JsonRoute
from app.api.problems import problems
from app.api.resources import AllocationView, Frontier, JobView, ProfileList, ProfileView
from app.api.serializers import allocation_view, frontier_view, profile_view
from app.services import profiles
from app.shared.errors import ProfileNotFoundError
from app.shared.repositories.profiles import NOT_FOUND
from app.shared.requests import AllocationRequest, ProfileRequest

router = APIRouter(prefix="/profiles", tags=["profiles"], route_class=JsonRoute)


def _profile_id(profile_id: Annotated[str, Path(description="id of a profile")]) -> str:
    if not is_profile_id(profile_id):
        raise ProfileNotFoundError(NOT_FOUND)
    return profile_id


ProfileId = Annotated[str, Depends(_profile_id)]


@router.get("", responses=problems(422))
def list_profiles(
    context: ContextDep,
    owner: OwnerDep,
    after: AfterProfile = None,
    limit: PageSize = 20,
) -> ProfileList:
    """List profiles created by jobs, newest first.

    Profiles beyond `ROCKET_MAX_PROFILES` are deleted, least recently used first, and those that no job has used for
    `ROCKET_PROFILE_RETENTION_DAYS`, if that is set; never the profile of a job that has not ended.
    """
    page, has_more = profiles.list_profiles(context, owner, after=after, limit=limit)
    return ProfileList(
        data=[profile_view(profile) for profile in page],
        has_more=has_more,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
    )


@router.post("", **creates_job(503))
async def make_profile(body: ProfileRequest, submission: SubmissionDep) -> JobView:
    """Submit a job that only calibrates and profiles a model; its `profile_id` then names the profile.

    A later `POST /jobs` with the same model, calibration and options resumes from there.
    """
    return await submission.accept(body.job_request())


@router.get("/{profile_id}", responses=problems(404))
def get_profile(profile_id: ProfileId, context: ContextDep, owner: OwnerDep) -> ProfileView:
    """Return a profile."""
    return profile_view(profiles.get_profile(context, owner, profile_id))


@router.delete("/{profile_id}", status_code=status.HTTP_204_NO_CONTENT, responses=problems(404))
def delete_profile(profile_id: ProfileId, context: ContextDep, actor: ActorDep) -> None:
    """Delete a profile; the jobs that created or used it remain."""
    profiles.delete_profile(context, actor, profile_id)


@router.get("/{profile_id}/frontier", responses=problems(404))
def get_frontier(profile_id: ProfileId, context: ContextDep, owner: OwnerDep) -> Frontier:
    """Return the size and predicted error at every hundredth, and at the largest reachable ratio."""
    return frontier_view(*profiles.get_frontier(context, owner, profile_id))


@router.post("/{profile_id}/allocations", dependencies=[JSON_BODY], responses=problems(400, 404, 413, 415, 422))
def allocate(profile_id: ProfileId, body: AllocationRequest, context: ContextDep, owner: OwnerDep) -> AllocationView:
    """Return the candidate of each layer for a ratio, a size, bits per weight or an error; nothing is computed."""
    return allocation_view(profiles.allocate(context, owner, profile_id, body.target))
