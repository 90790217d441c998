"""Items of the knapsack: a layer's own candidates, or for an input group every combination of its members' choices.

An input group that may share a dictionary is one item of the knapsack: its options are the combinations of the
members' own candidates, and the shared candidates. Dominated options (another costs no more and errs less) are left
out, because none of them can be part of an optimum.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64, Int64

from rocket_core.allocation.label_search import undominated
from rocket_core.candidates import Candidate, FormatGroup, LayerProfile
from rocket_core.config import Objective
from rocket_core.errors import InvalidConfigError
from rocket_core.sizes.budget import BudgetUnit


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """Costs and errors of the choices for a layer.

    Choices number the layer's own candidates first, then the shared ones of its group. The shared ones are priced for
    all members together, at the group's first layer; the other layers have no entries for them.

    Attributes:
        costs: each choice's share of the budget.
        errors: each choice's contribution to the objective.
    """

    costs: Int64[np.ndarray, " choices"]
    errors: Float64[np.ndarray, " choices"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Layers that are decided together.

    Attributes:
        layers: their indices among the profiles.
        costs: cost of each option.
        errors: error of each option.
        choices: for each option the index of each layer's candidate, see `chosen_candidate`.
    """

    layers: tuple[int, ...]
    costs: Int64[np.ndarray, " options"]
    errors: Float64[np.ndarray, " options"]
    choices: Int64[np.ndarray, "options layers"]


def costs_of(candidates: Sequence[Candidate], budget_unit: BudgetUnit) -> Int64[np.ndarray, " candidates"]:
    """Return what candidates cost: kept parameters or stored bytes."""
    if budget_unit == "bytes":
        return np.array([candidate.stored_bytes for candidate in candidates], dtype=np.int64)
    return np.array([candidate.kept_parameters for candidate in candidates], dtype=np.int64)


def errors_of(candidates: Sequence[Candidate], objective: Objective) -> Float64[np.ndarray, " candidates"]:
    """Return what candidates contribute to the objective.

    Raises:
        InvalidConfigError: the objective is `fisher`, and a candidate has no loss.
    """
    if objective == "weight":
        return np.array([candidate.weight_error for candidate in candidates], dtype=np.float64)
    if objective == "whitened":
        return np.array([candidate.reconstruction_error for candidate in candidates], dtype=np.float64) ** 2
    losses = [0.0 if candidate.kind == "dense" else candidate.loss for candidate in candidates]
    if None in losses:
        raise InvalidConfigError("the layers were profiled without sensitivities; objective fisher needs them")
    return np.array(losses, dtype=np.float64)


def price(profiles: Sequence[LayerProfile], budget_unit: BudgetUnit, objective: Objective) -> list[Priced]:
    """Return the cost and error of every choice for every layer.

    Raises:
        InvalidConfigError: the objective is `fisher`, and a candidate has no loss.
    """
    priced = []
    for profile in profiles:
        costs, errors = costs_of(profile.candidates, budget_unit), errors_of(profile.candidates, objective)
        if profile.shared:
            members = [member for shared in profile.shared for member in shared.members]
            together = (len(profile.shared), -1)
            costs = np.append(costs, costs_of(members, budget_unit).reshape(together).sum(axis=1))
            errors = np.append(errors, errors_of(members, objective).reshape(together).sum(axis=1))
        priced.append(Priced(costs=costs, errors=errors))
    return priced


def build_items(
    profiles: Sequence[LayerProfile], priced: Sequence[Priced], format_groups: Iterable[FormatGroup] = ()
) -> list[Item]:
    """Return the items in the order of their first layers.

    Args:
        profiles: all layers.
        priced: costs and errors of each layer's choices.
        format_groups: layers that must be stored in the same way; a layer is in one group at most.
    """
    places = {profile.name: index for index, profile in enumerate(profiles)}
    agreeing = {places[group.layers[0]]: group for group in format_groups}
    grouped = {places[name] for group in agreeing.values() for name in group.layers}
    members: dict[str, list[int]] = {}
    for index, profile in enumerate(profiles):
        members.setdefault(profile.input_group, []).append(index)
    sharing = {profile.input_group for profile in profiles if profile.shared}
    items = []
    for index, profile in enumerate(profiles):
        group = members[profile.input_group]
        if index in agreeing:
            same = [places[name] for name in agreeing[index].layers]
            items.append(_agreeing(same, profiles, priced, dense=agreeing[index].dense))
        elif index in grouped:
            continue
        elif profile.input_group not in sharing:
            items.append(_own(index, profile, priced[index]))
        elif group[0] == index:
            combined = _combined([_own(member, profiles[member], priced[member]) for member in group])
            counts = [len(profiles[member].candidates) for member in group]
            items.append(_with_shared(combined, priced[index], counts))
    return items


def chosen_candidate(
    profiles: Sequence[LayerProfile], choices: Sequence[int]
) -> Iterator[tuple[LayerProfile, Candidate]]:
    """Yield each layer with its chosen candidate.

    Choices number the layer's own candidates first, then the shared ones of its group.

    Args:
        profiles: all layers.
        choices: one index per layer.
    """
    first_layers = {profile.input_group: profile for profile in profiles if profile.shared}
    places: dict[str, int] = {}
    for profile, choice in zip(profiles, choices, strict=True):
        member = places.setdefault(profile.input_group, 0)
        places[profile.input_group] += 1
        own = len(profile.candidates)
        if choice < own:
            yield profile, profile.candidates[choice]
        else:
            yield profile, first_layers[profile.input_group].shared[choice - own].members[member]


def _own(index: int, profile: LayerProfile, priced: Priced) -> Item:
    own = len(profile.candidates)
    choices = np.arange(own)[:, None]
    return Item(layers=(index,), costs=priced.costs[:own], errors=priced.errors[:own], choices=choices)


def _agreeing(group: Sequence[int], profiles: Sequence[LayerProfile], priced: Sequence[Priced], *, dense: bool) -> Item:
    """Return one item whose options store all layers of a group in the same way; dense is one that all have."""
    places = [{_way(candidate): place for place, candidate in enumerate(profiles[index].candidates)} for index in group]
    common = [way for way in places[0] if all(way in others for others in places) and (dense or way[0] != "dense")]
    assert common, f"{profiles[group[0]].name} and the layers that must agree with it have no format in common"
    choices = np.array([[own[way] for own in places] for way in common], dtype=np.int64)
    columns = list(enumerate(group))
    costs = np.stack([priced[index].costs[choices[:, column]] for column, index in columns])
    errors = np.stack([priced[index].errors[choices[:, column]] for column, index in columns])
    return _undominated(Item(layers=tuple(group), costs=costs.sum(axis=0), errors=errors.sum(axis=0), choices=choices))


def _way(candidate: Candidate) -> tuple[object, ...]:
    return candidate.kind, candidate.bits, candidate.group_size, candidate.scale_bits, candidate.block_type


def _combined(items: Sequence[Item]) -> Item:
    """Return one item that decides for the layers of all given items."""
    combined, *others = map(_undominated, items)
    for item in others:
        costs, errors = (
            np.add.outer(combined.costs, item.costs).ravel(),
            np.add.outer(combined.errors, item.errors).ravel(),
        )
        options = undominated(costs, errors)
        first, second = np.divmod(options, len(item.costs))
        combined = Item(
            layers=combined.layers + item.layers,
            costs=costs[options],
            errors=errors[options],
            choices=np.hstack([combined.choices[first], item.choices[second]]),
        )
    return combined


def _with_shared(own: Item, first: Priced, counts: Sequence[int]) -> Item:
    """Add the shared candidates of a group; `counts` is the number of each member's own candidates."""
    shared = np.arange(len(first.costs) - counts[0])
    return _undominated(
        Item(
            layers=own.layers,
            costs=np.append(own.costs, first.costs[counts[0] :]),
            errors=np.append(own.errors, first.errors[counts[0] :]),
            choices=np.vstack([own.choices, np.add.outer(shared, counts)]),
        )
    )


def _undominated(item: Item) -> Item:
    """Return the undominated options by rising cost; of options with equal cost and error, the first."""
    options = undominated(item.costs, item.errors)
    return replace(item, costs=item.costs[options], errors=item.errors[options], choices=item.choices[options])
