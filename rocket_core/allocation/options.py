"""What the knapsack chooses from: a layer's own candidates, or for an input group every choice of all its members.

An input group that may share a dictionary is one item of the knapsack: its options are the combinations of the
members' own candidates, and the shared candidates. Dominated options (another costs no more and errs less) are left
out: none of them can be part of an optimum.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from rocket_core.candidates import Candidate, LayerProfile

Cost = Callable[[Candidate], int]
Error = Callable[[Candidate], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Layers that are chosen for together.

    Attributes:
        layers: their places among the profiles.
        costs: cost of each option.
        errors: error of each option; infinite if it is not allowed.
        choices: for each option the number of each layer's candidate, see `chosen_candidate`.
    """

    layers: tuple[int, ...]
    costs: Int64[np.ndarray, " options"]
    errors: Float64[np.ndarray, " options"]
    choices: Int64[np.ndarray, "options layers"]


def build_items(profiles: Sequence[LayerProfile], cost: Cost, error: Error) -> list[Item]:
    """Items in the order of their first layers.

    Args:
        profiles: all layers.
        cost: what a candidate takes of the budget.
        error: what it adds to the objective.
    """
    places = {profile.name: place for place, profile in enumerate(profiles)}
    groups = {profile.input_group: _members(profiles, profile) for profile in profiles if profile.shared}
    items = []
    for place, profile in enumerate(profiles):
        members = groups.get(profile.input_group)
        if members is None:
            items.append(_own(place, profile, cost, error))
        elif places[members[0].name] == place:
            own = [_own(places[member.name], member, cost, error) for member in members]
            items.append(_with_shared(_combined(own), members, cost, error))
    return items


def chosen_candidate(
    profiles: Sequence[LayerProfile], choices: Sequence[int], leaders: Mapping[str, LayerProfile]
) -> Iterator[tuple[LayerProfile, Candidate]]:
    """Each layer with the candidate that its choice stands for.

    A choice counts through the layer's own candidates, then through the shared ones of its group.

    Args:
        profiles: all layers.
        choices: one number per layer.
        leaders: the first layer of each input group.
    """
    places: dict[str, int] = {}
    for profile, choice in zip(profiles, choices, strict=True):
        member = places.setdefault(profile.input_group, 0)
        places[profile.input_group] += 1
        own = len(profile.candidates)
        if choice < own:
            yield profile, profile.candidates[choice]
        else:
            yield profile, leaders[profile.input_group].shared[choice - own].members[member]


def _members(profiles: Sequence[LayerProfile], leader: LayerProfile) -> list[LayerProfile]:
    return [profile for profile in profiles if profile.input_group == leader.input_group]


def _own(place: int, profile: LayerProfile, cost: Cost, error: Error) -> Item:
    return Item(
        layers=(place,),
        costs=np.array([cost(candidate) for candidate in profile.candidates], dtype=np.int64),
        errors=np.array([error(candidate) for candidate in profile.candidates], dtype=np.float64),
        choices=np.arange(len(profile.candidates))[:, None],
    )


def _combined(items: Sequence[Item]) -> Item:
    """One item that chooses for the layers of all."""
    whole = _undominated(items[0])
    for item in map(_undominated, items[1:]):
        first, second = (index.ravel() for index in np.indices((len(whole.costs), len(item.costs))))
        whole = _undominated(
            Item(
                layers=whole.layers + item.layers,
                costs=whole.costs[first] + item.costs[second],
                errors=whole.errors[first] + item.errors[second],
                choices=np.hstack([whole.choices[first], item.choices[second]]),
            )
        )
    return whole


def _with_shared(own: Item, members: Sequence[LayerProfile], cost: Cost, error: Error) -> Item:
    shared = members[0].shared
    counts = [len(member.candidates) for member in members]
    return _undominated(
        Item(
            layers=own.layers,
            costs=np.append(own.costs, [sum(map(cost, candidate.members)) for candidate in shared]).astype(np.int64),
            errors=np.append(own.errors, [sum(map(error, candidate.members)) for candidate in shared]),
            choices=np.vstack([own.choices, [[count + index for count in counts] for index in range(len(shared))]]),
        )
    )


def _undominated(item: Item) -> Item:
    """By falling cost; of equal costs and errors the first."""
    order = np.lexsort((item.errors, item.costs))
    best = np.minimum.accumulate(np.append(np.inf, item.errors[order][:-1]))
    kept = order[item.errors[order] < best][::-1]
    return Item(layers=item.layers, costs=item.costs[kept], errors=item.errors[kept], choices=item.choices[kept])
