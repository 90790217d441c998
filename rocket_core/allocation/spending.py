"""Spending of the budget that the chosen candidates leave: more nonzeros where they help most."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from rocket_core.allocation.items import Priced
from rocket_core.candidates import Candidate, LayerProfile, SharedCandidate


@dataclass(frozen=True, kw_only=True, slots=True)
class _Room:
    """Room for more nonzeros in a layer, or in a group that shares a dictionary, represented by its first layer.

    Attributes:
        index: index of the layer among the profiles.
        next_size: nonzeros up to the next larger candidate.
        most: upper bound on the nonzeros that can be added.
        slope: decrease of the error per cost up to the next larger candidate.
    """

    index: int
    next_size: int
    most: int
    slope: float


def spend(
    profiles: Sequence[LayerProfile],
    choices: Sequence[int],
    priced: Sequence[Priced],
    left: int,
    per_nonzero: int,
) -> tuple[int, ...]:
    """Return the nonzeros that each layer gets in addition to its candidate's.

    The layers whose next larger candidate of the same kind lowers the error most for its cost come first, and get at
    most as many nonzeros as that candidate has; the rest goes to any layer with room left. Candidates' errors are not
    changed: the gain of more nonzeros is known only once they are computed.

    Args:
        profiles: all layers.
        choices: index of each layer's candidate: its own are numbered first, then the shared ones of its group.
        priced: costs and errors of each layer's choices.
        left: rest of the budget.
        per_nonzero: cost of one more nonzero.

    Returns:
        One number per layer, zero for dense and low-rank ones; for layers that share a dictionary, the first one's
        number is the total of the group.
    """
    outputs: Counter[str] = Counter()
    for profile in profiles:
        outputs[profile.input_group] += profile.d_out
    rooms = [
        room
        for index, (profile, choice) in enumerate(zip(profiles, choices, strict=True))
        if (room := _room(index, profile, choice, priced[index], outputs[profile.input_group])) is not None
    ]
    rooms.sort(key=lambda room: -room.slope)
    extra = [0] * len(profiles)
    for limit in (attrgetter("next_size"), attrgetter("most")):
        for room in rooms:
            grant = max(0, min(limit(room) - extra[room.index], left // per_nonzero))
            extra[room.index] += grant
            left -= grant * per_nonzero
    return tuple(extra)


def _room(index: int, profile: LayerProfile, choice: int, priced: Priced, group_outputs: int) -> _Room | None:
    own = len(profile.candidates)
    shares = choice >= own
    if choice >= len(priced.costs):  # the group's first layer holds the room of all members
        return None
    alternatives: Sequence[Candidate | SharedCandidate] = profile.shared if shares else profile.candidates
    offset = own if shares else 0
    now = alternatives[choice - offset]
    if now.kind not in {"factored", "sparse"}:
        return None
    assert now.nnz is not None
    entries = profile.parameters if now.rank is None else now.rank * (group_outputs if shares else profile.d_out)
    # One less than all places: a full support is another kind, stored without a mask.
    most = max(0, entries - now.nnz - 1)
    costs, errors = priced.costs[offset:].tolist(), priced.errors[offset:].tolist()
    cost, error = costs[choice - offset], errors[choice - offset]
    larger = [index for index, other in enumerate(alternatives) if costs[index] > cost and other.kind == now.kind]
    if larger:
        following = min(larger, key=costs.__getitem__)
        next_size = min(most, max(0, alternatives[following].kept_parameters - now.kept_parameters))
        slope = (error - errors[following]) / (costs[following] - cost)
    else:  # only dense is larger
        next_size = most
        slope = error / max(1, most)
    return _Room(index=index, next_size=next_size, most=most, slope=slope)
