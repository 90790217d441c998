"""Kinds, sharing groups and spending, compared with exhaustive search."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_core.allocation.allocator import Allocator, chosen, layer_frontiers
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.errors import InfeasibleBudgetError, InvalidConfigError
from rocket_core.sizes.budget import parameter_budget
from tests.reference import choices as reference
from tests.reference.allocations import allocate
from tests.reference.choices import ITEMSIZE, models
from tests.sampling import examples

many = settings(max_examples=examples(50), deadline=None)
RATIOS = st.one_of(st.floats(0, 0.95), st.sampled_from([0.0, 0.2, 0.5]))
MEASURES = st.sampled_from(["parameters", "bytes"])


def allocated(profiles, ratio, budget_unit, objective, slack=0.01):
    return allocate(profiles, ratio, objective=objective, cap_slack=slack, budget_unit=budget_unit, itemsize=ITEMSIZE)


def taken(profiles, allocation):
    """Return each layer's candidate without its extra nonzeros."""
    plain = allocation.model_copy(update={"extra_nonzeros": (0,) * len(profiles)})
    return [candidate for _, candidate in chosen(profiles, plain, itemsize=ITEMSIZE)]


@many
@given(models(), RATIOS, MEASURES, st.sampled_from(["whitened", "fisher"]))
def test_the_choice_is_the_best_of_all_that_fit(profiles, ratio, budget_unit, objective):
    whole = sum(reference.cost(profile.candidates[0], budget_unit) for profile in profiles)
    allowed = parameter_budget(whole, ratio)
    best = reference.least_error(profiles, allowed, budget_unit, objective)
    if best is None:
        with pytest.raises(InfeasibleBudgetError):
            allocated(profiles, ratio, budget_unit, objective)
        return
    allocation = allocated(profiles, ratio, budget_unit, objective)
    candidates = taken(profiles, allocation)
    assert tuple(candidates) in set(reference.every_choice(profiles))
    assert allocation.total_error == pytest.approx(best, abs=1e-12)
    assert sum(reference.error(candidate, objective) for candidate in candidates) == pytest.approx(best, abs=1e-12)
    assert (allocation.budget, allocation.compressible, allocation.budget_unit) == (allowed, whole, budget_unit)
    assert sum(reference.cost(candidate, budget_unit) for candidate in candidates) <= allowed
    assert allocation.proven


@many
@given(models(), RATIOS, MEASURES, st.sampled_from(["whitened", "fisher"]))
def test_spending_uses_the_budget_and_never_exceeds_it(profiles, ratio, budget_unit, objective):
    try:
        allocation = allocated(profiles, ratio, budget_unit, objective)
    except InfeasibleBudgetError:
        return
    enlarged = [candidate for _, candidate in chosen(profiles, allocation, itemsize=ITEMSIZE)]
    kept = sum(reference.cost(candidate, budget_unit) for candidate in enlarged)
    assert kept == allocation.kept <= allocation.budget
    widths = {}
    for profile in profiles:
        widths[profile.input_group] = widths.get(profile.input_group, 0) + profile.d_out
    room = 0
    for place, (profile, before) in enumerate(zip(profiles, taken(profiles, allocation), strict=True)):
        extra = allocation.extra_nonzeros[place]
        assert extra >= 0
        if before.kind not in {"factored", "sparse"} or before.dictionary not in {None, profile.name}:
            assert extra == 0
            continue
        stored, rows = before.nnz, before.rank or profile.d_in
        outputs = profile.d_out
        if before.dictionary is not None:
            group = [index for index, other in enumerate(profiles) if other.input_group == profile.name]
            stored = sum(taken(profiles, allocation)[index].nnz for index in group)
            outputs = widths[profile.name]
        assert stored + extra <= max(stored, rows * outputs - 1)
        room += max(0, rows * outputs - 1 - stored) - extra
        after = enlarged[place]
        assert after.nnz == before.nnz + extra
        assert after.kept_parameters == before.kept_parameters + extra
        assert after.stored_bytes == before.stored_bytes + extra * ITEMSIZE
    assert room == 0 or allocation.budget - kept < (ITEMSIZE if budget_unit == "bytes" else 1)


@many
@given(models(sharing=False), RATIOS, MEASURES, st.sampled_from([0.0, 0.5]))
def test_the_paper_objective_respects_its_cap_and_spends_nothing(profiles, ratio, budget_unit, slack):
    whole = sum(reference.cost(profile.candidates[0], budget_unit) for profile in profiles)
    allowed = parameter_budget(whole, ratio)
    fitting = [
        [candidate.weight_error for candidate in choice]
        for choice in reference.every_choice(profiles)
        if sum(reference.cost(candidate, budget_unit) for candidate in choice) <= allowed
    ]
    if not fitting:
        return
    cap = min(map(max, fitting)) * (1 + slack)
    allocation = allocated(profiles, ratio, budget_unit, "weight", slack)
    assert allocation.total_error == pytest.approx(min(sum(errors) for errors in fitting if max(errors) <= cap))
    assert not any(allocation.extra_nonzeros)


@many
@given(models(), MEASURES, st.sampled_from(["whitened", "fisher", "weight"]))
def test_frontiers_omit_dominated_candidates(profiles, budget_unit, objective):
    frontiers = layer_frontiers(profiles, objective, budget_unit)
    assert list(frontiers) == [profile.name for profile in profiles]
    for profile in profiles:
        expected = []
        for shared, ways in (
            (False, [(candidate,) for candidate in profile.candidates]),
            (True, [shared.members for shared in profile.shared]),
        ):
            points = [
                (
                    sum(reference.cost(member, budget_unit) for member in members),
                    sum(reference.error(member, objective) for member in members),
                )
                for members in ways
            ]
            best = {
                point
                for point in points
                if not any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)
            }
            expected += [(shared, *point) for point in sorted(best, reverse=True)]
        found = [(point.shared, point.cost, point.error) for point in frontiers[profile.name]]
        assert [point[:2] for point in found] == [point[:2] for point in expected]
        assert [point[2] for point in found] == pytest.approx([point[2] for point in expected])


@many
@given(models(), MEASURES)
def test_the_reachable_ratio_is_reachable_and_the_next_is_not(profiles, budget_unit):
    nearest = Allocator(profiles, objective="whitened", cap_slack=0.0, budget_unit=budget_unit).reachable_ratio
    smallest = min(
        sum(reference.cost(candidate, budget_unit) for candidate in choice)
        for choice in reference.every_choice(profiles)
    )
    whole = sum(reference.cost(profile.candidates[0], budget_unit) for profile in profiles)
    assert smallest <= parameter_budget(whole, nearest)
    assert nearest >= 0.9999 or smallest > parameter_budget(whole, round(nearest + 1e-4, 4))


def layer(name, ways, size=(10, 10)):
    """Return a layer of sparse candidates, from (nonzeros, loss), dense first."""
    return LayerProfile(
        name=name,
        d_in=size[0],
        d_out=size[1],
        input_group=name,
        tokens=5,
        candidates=tuple(
            Candidate(
                kind="sparse" if nnz < size[0] * size[1] else "dense",
                nnz=nnz if nnz < size[0] * size[1] else None,
                kept_parameters=nnz,
                stored_bytes=2 * nnz + 20,
                reconstruction_error=loss,
                weight_error=loss,
                loss=loss,
            )
            for nnz, loss in ways
        ),
    )


def test_the_rest_is_spent_where_it_gains_most():
    profiles = [
        layer("flat", [(100, 0.0), (80, 0.30), (40, 0.32)]),
        layer("steep", [(100, 0.0), (80, 0.5), (40, 0.9)]),
    ]
    # Only 40 + 40 fits into 100, with 20 left to spend: half of the way to the steep layer's next candidate.
    allocation = allocated(profiles, 0.5, "parameters", "fisher")
    assert allocation.choices == (2, 2)
    assert allocation.extra_nonzeros == (0, 20)
    assert allocation.kept == 100


def test_an_unmeasured_loss_is_refused_only_if_needed():
    profile = layer("one", [(100, 0.0), (50, 0.3)])
    unmeasured = profile.model_copy(
        update={"candidates": tuple(c.model_copy(update={"loss": None}) for c in profile.candidates)}
    )
    with pytest.raises(InvalidConfigError, match="sensitivities"):
        allocated([unmeasured], 0.3, "parameters", "fisher")
    assert allocated([unmeasured], 0.3, "parameters", "whitened").choices == (1,)


@pytest.mark.parametrize("budget_unit", ["parameters", "bytes"])
def test_a_large_model_with_shared_layers_is_allocated_quickly(budget_unit):
    profiles = []
    for block in range(36):
        for name, leader, d_out in (("q", "q", 32), ("k", "q", 8), ("v", "q", 8), ("o", "o", 32)):
            profiles.append(_profile(block, name, leader, d_out, widths=(32, 8, 8)))
        for name, leader, d_out in (("gate", "gate", 96), ("up", "gate", 96), ("down", "down", 32)):
            profiles.append(_profile(block, name, leader, d_out, widths=(96, 96)))
    assert len(profiles) == 252
    began = time.process_time()
    allocation = allocated(profiles, 0.4, budget_unit, "fisher")
    # Some 25 ms; a few combinations too many would be seconds.
    assert time.process_time() - began < 1
    assert allocation.proven
    assert allocation.budget - allocation.kept < ITEMSIZE


def _profile(block, name, leader, d_out, widths):
    scale = 1 + (block * 7 + sum(map(ord, name))) % 13
    steps = [(kind, step / 20) for kind in ("low_rank", "factored", "sparse") for step in range(1, 15)]

    def candidate(kind, ratio, width, dictionary=None, better=1.0):
        kept = int((1 - ratio) * 32 * width)
        loss = better * scale * (ratio + 0.1 * len(kind) / 10 + 0.01 * ((block + int(ratio * 20)) % 3)) ** 2
        return Candidate(
            kind=kind,
            rank=None if kind == "sparse" else 32,
            nnz=kept // 2 + 1,
            dictionary=dictionary,
            kept_parameters=kept,
            stored_bytes=2 * kept + (0 if kind == "low_rank" else 4 * width),
            reconstruction_error=loss,
            weight_error=loss,
            loss=loss,
        )

    shared = []
    if name == leader and name in {"q", "gate"}:
        shared = [
            {"members": tuple(candidate("factored", step / 20, width, f"{block}.{name}", 0.8) for width in widths)}
            for step in range(1, 15)
        ]
    dense = candidate("sparse", 0.0, d_out).model_copy(
        update={"kind": "dense", "nnz": None, "stored_bytes": 64 * d_out, "loss": 0.0}
    )
    return LayerProfile(
        name=f"{block}.{name}",
        d_in=32,
        d_out=d_out,
        input_group=f"{block}.{leader}",
        tokens=5,
        candidates=(dense, *(candidate(kind, ratio, d_out) for kind, ratio in steps)),
        shared=shared,
    )
