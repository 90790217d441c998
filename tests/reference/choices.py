"""All possible choices for layers of several input groups, enumerated."""

import itertools

from hypothesis import strategies as st

from rocket_core.candidates import Candidate, LayerProfile, SharedCandidate
from rocket_core.sizes import budget

ITEMSIZE = 2
KINDS = ("low_rank", "factored", "sparse")


def cost(candidate, budget_unit):
    return candidate.stored_bytes if budget_unit == "bytes" else candidate.kept_parameters


def error(candidate, objective):
    if objective == "weight":
        return candidate.weight_error
    return candidate.reconstruction_error**2 if objective == "whitened" else candidate.loss


def every_choice(profiles):
    """Yield tuples of one candidate per layer: separate ones in a group, or one shared candidate for all."""
    groups = {}
    for place, profile in enumerate(profiles):
        groups.setdefault(profile.input_group, []).append(place)
    by_group = []
    for places in groups.values():
        own = list(itertools.product(*(profiles[place].candidates for place in places)))
        by_group.append(own + [shared.members for shared in profiles[places[0]].shared])
    for combination in itertools.product(*by_group):
        found = [None] * len(profiles)
        for places, members in zip(groups.values(), combination, strict=True):
            for place, member in zip(places, members, strict=True):
                found[place] = member
        yield tuple(found)


def least_error(profiles, allowed, budget_unit, objective):
    """Return the least error of all choices within a budget; None if no choice fits."""
    sums = [
        sum(error(candidate, objective) for candidate in choice)
        for choice in every_choice(profiles)
        if sum(cost(candidate, budget_unit) for candidate in choice) <= allowed
    ]
    return min(sums, default=None)


@st.composite
def candidates(draw, d_in, d_out, dictionary=None, rank=None, owns=True):
    """Return a candidate of true sizes and any errors."""
    kind = draw(st.sampled_from(KINDS if dictionary is None else KINDS[:2])) if rank is None else "factored"
    numbers = st.floats(0, 1)
    if kind == "sparse":
        nnz = draw(st.integers(1, d_in * d_out - 1))
        sizes = {"kept_parameters": nnz, "stored_bytes": budget.sparse_bytes(d_in, d_out, nnz, ITEMSIZE)}
    else:
        rank = rank or draw(st.integers(2, 4))
        nnz = rank * d_out if kind == "low_rank" else draw(st.integers(1, rank * d_out - 1))
        atoms = rank * d_in if owns else 0
        sizes = {
            "kept_parameters": atoms + nnz,
            "stored_bytes": atoms * ITEMSIZE + budget.coefficient_bytes(d_out, rank, nnz, ITEMSIZE),
        }
    return Candidate(
        kind=kind,
        rank=None if kind == "sparse" else rank,
        nnz=nnz,
        dictionary=dictionary,
        reconstruction_error=draw(numbers),
        weight_error=draw(numbers),
        loss=draw(numbers),
        **sizes,
    )


@st.composite
def models(draw, sharing=True):
    """Return a few layers, some of which read one input."""
    profiles = []
    for group in range(draw(st.integers(1, 3))):
        d_in = draw(st.integers(3, 9))
        widths = draw(st.lists(st.integers(2, 9), min_size=1, max_size=2))
        leader = f"{group}.0"
        for index, d_out in enumerate(widths):
            shared = []
            if sharing and index == 0 and len(widths) > 1:
                for _ in range(draw(st.integers(0, 3))):
                    rank = draw(st.integers(2, 4))
                    shared.append(
                        SharedCandidate(
                            members=tuple(
                                draw(candidates(d_in, width, leader, rank, owns=place == 0))
                                for place, width in enumerate(widths)
                            )
                        )
                    )
            dense = Candidate(
                kind="dense",
                kept_parameters=d_in * d_out,
                stored_bytes=d_in * d_out * ITEMSIZE,
                reconstruction_error=0,
                weight_error=0,
                loss=0,
            )
            profiles.append(
                LayerProfile(
                    name=f"{group}.{index}",
                    d_in=d_in,
                    d_out=d_out,
                    input_group=leader,
                    tokens=5,
                    candidates=(dense, *draw(st.lists(candidates(d_in, d_out), max_size=3))),
                    shared=tuple(shared),
                )
            )
    return profiles
