"""Predictions of models at any ratio, without a worker."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.services.context import Context
from app.shared.models import Profile
from app.shared.repositories import audit, profiles
from app.shared.repositories.audit import Action, Actor
from app.shared.requests import JobRequest
from rocket_core.config import SETTINGS_NOT_IN_PROFILE
from rocket_core.sizes.budget import bits_per_weight
from rocket_core.sizes.target import ByError, Target

if TYPE_CHECKING:
    from rocket_core.allocation import Allocation
    from rocket_core.allocation.predictor import Predictor
    from rocket_core.candidates import Candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """A predicted allocation.

    Attributes:
        predictor: the profiled model.
        allocation: the knapsack's solution.
        chosen: names of all layers with their candidates.
    """

    predictor: "Predictor"
    allocation: "Allocation"
    chosen: Sequence[tuple[str, "Candidate"]]

    @property
    def model_bytes(self) -> int:
        """Bytes that all weights of the model would take."""
        others = self.predictor.profile.bytes_beside(len(self.chosen))
        return others + sum(candidate.stored_bytes for _, candidate in self.chosen)

    @property
    def bits(self) -> float:
        """Stored bits for each weight of the layers in blocks."""
        profile = self.predictor.profile
        stored = sum(candidate.stored_bytes for _, candidate in self.chosen[: len(profile.layers)])
        return bits_per_weight(profile.compressible_parameters, 1, stored)


def list_profiles(context: Context, owner: str, *, after: str | None, limit: int) -> tuple[Sequence[Profile], bool]:
    """Return a page of profiles, newest first, and whether there are more."""
    with context.database.snapshot() as session:
        page = profiles.list_profiles(session, owner, after=after, limit=limit + 1)
    return page[:limit], len(page) > limit


def get_profile(context: Context, owner: str, profile_id: str) -> Profile:
    """Return a profile.

    Raises:
        ProfileNotFoundError: the profile does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        return profiles.get_profile(session, profile_id, owner)


def find_profile_for(context: Context, owner: str, request: JobRequest) -> Profile | None:
    """Return a profile that matches a request by name: the newest of the same model, data and options.

    Only a worker can tell whether the model itself is still the same; it makes another profile if not.
    """
    options = _what_counts(request.options.model_dump(mode="json"))
    calibration = request.calibration.model_dump(mode="json")
    with context.database.snapshot() as session:
        for profile in profiles.list_profiles_of(session, owner, request.model_id):
            if profile.calibration == calibration and _what_counts(profile.options) == options:
                return profile
    return None


def _what_counts(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in SETTINGS_NOT_IN_PROFILE}


def get_frontier(context: Context, owner: str, profile_id: str) -> tuple["Predictor", list[dict[str, Any]]]:
    """Return the profiled model, and its predicted size and error at every ratio.

    Raises:
        ProfileNotFoundError: the profile does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        profile = profiles.get_profile(session, profile_id, owner)
        return context.predictors.of(profile), profile.frontier


def allocate(context: Context, owner: str, profile_id: str, target: Target | ByError) -> Predicted:
    """Return the predicted allocation for a ratio, a size, bits per weight or an error bound.

    Raises:
        ProfileNotFoundError: the profile does not exist, or is not the tenant's.
        RocketError: no choice of candidates is that small.
    """
    with context.database.snapshot() as session:
        predictor = context.predictors.of(profiles.get_profile(session, profile_id, owner))
    allocation = predictor.allocate(target)
    chosen = [(layer.name, candidate) for layer, candidate in predictor.chosen(allocation)]
    return Predicted(predictor=predictor, allocation=allocation, chosen=chosen)


def delete_profile(context: Context, actor: Actor, profile_id: str) -> None:
    """Delete a profile; what workers cache of it on disk is evicted when the space is needed.

    Raises:
        ProfileNotFoundError: the profile does not exist, or is not the tenant's.
    """
    with context.database.transaction() as session:
        profiles.delete_profile(session, profile_id, actor.tenant)
        audit.record(session, actor, Action.PROFILE_DELETE, subject=profile_id)
