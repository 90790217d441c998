"""Spending what the chosen candidates leave of the budget: more nonzeros where they help most."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from rocket_core.allocation.options import Cost, Error
from rocket_core.candidates import Candidate, LayerProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class _Room:
    """Where nonzeros could be added: a layer, or a group that shares a dictionary, by its first layer.

    Attributes:
        place: of the layer among the profiles.
        wanted: nonzeros up to the next larger candidate.
        most: nonzeros that there are places for.
        slope: fall of the error by cost on the way there.
    """

    place: int
    wanted: int
    most: int
    slope: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """A way to store a layer or a group."""

    kind: str
    kept: int
    cost: int
    error: float


def spend(
    profiles: Sequence[LayerProfile],
    chosen: Sequence[Candidate],
    left: int,
    costs: tuple[Cost, int],
    error: Error,
) -> tuple[int, ...]:
    """Nonzeros that each layer gets beyond its candidate's.

    The layers whose next larger candidate of the same kind lowers the error most for its cost come first, and get no
    more than that one has; what then is left goes to whoever has places for it. Candidates' errors stay what they are:
    what more nonzeros gain is known once they are computed.

    Args:
        profiles: all layers.
        chosen: the candidate of each.
        left: what is left of the budget.
        costs: what a candidate takes of the budget, and what one more nonzero takes.
        error: what a candidate adds to the objective.

    Returns:
        One number per layer, zero for those that are dense or low-rank; for layers that share a dictionary, the first
        one's is that of all.
    """
    cost, per_nonzero = costs
    outputs: Counter[str] = Counter()
    for profile in profiles:
        outputs[profile.input_group] += profile.d_out
    rooms = [
        room
        for place, (profile, candidate) in enumerate(zip(profiles, chosen, strict=True))
        if (room := _room(place, profile, candidate, outputs[profile.input_group], (cost, error))) is not None
    ]
    rooms.sort(key=lambda room: -room.slope)
    extra = [0] * len(profiles)
    for limit in (attrgetter("wanted"), attrgetter("most")):
        for room in rooms:
            grant = max(0, min(limit(room) - extra[room.place], left // per_nonzero))
            extra[room.place] += grant
            left -= grant * per_nonzero
    return tuple(extra)


def _room(
    place: int, profile: LayerProfile, candidate: Candidate, group_outputs: int, measures: tuple[Cost, Error]
) -> _Room | None:
    if candidate.kind not in {"factored", "sparse"} or candidate.dictionary not in {None, profile.name}:
        return None
    assert candidate.nnz is not None
    own = [_choice((other,), measures) for other in profile.candidates]
    if candidate.dictionary is None:
        now = _choice((candidate,), measures)
        places = profile.parameters if candidate.rank is None else candidate.rank * profile.d_out
        nnz = candidate.nnz
    else:
        members = next(shared.members for shared in profile.shared if shared.members[0] == candidate)
        now = _choice(members, measures)
        assert candidate.rank is not None
        places = candidate.rank * group_outputs
        nnz = sum(member.nnz or 0 for member in members)
        own = [_choice(shared.members, measures) for shared in profile.shared]
    # One less than all places: a full support is another kind, stored without a mask.
    most = max(0, places - nnz - 1)
    larger = [other for other in own if other.kind == now.kind and other.cost > now.cost]
    following = min(larger, key=attrgetter("cost"), default=None)
    wanted = most if following is None else min(most, following.kept - now.kept)
    if following is None:  # nothing but dense is larger
        following = _Choice(kind="dense", kept=0, cost=now.cost + max(1, most), error=0.0)
    slope = (now.error - following.error) / (following.cost - now.cost)
    return _Room(place=place, wanted=max(0, wanted), most=most, slope=slope)


def _choice(members: Sequence[Candidate], measures: tuple[Cost, Error]) -> _Choice:
    cost, error = measures
    return _Choice(
        kind=members[0].kind,
        kept=sum(member.kept_parameters for member in members),
        cost=sum(map(cost, members)),
        error=sum(map(error, members)),
    )
