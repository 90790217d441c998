import functools
import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_core.allocation.allocator import Allocation, Allocator, chosen
from rocket_core.allocation.cap import smallest_cap
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.errors import InfeasibleBudgetError, InvalidConfigError
from rocket_core.pipeline.report_builder import allocation_report
from rocket_core.sizes.budget import parameter_budget
from tests.reference import knapsack as reference
from tests.reference.allocations import allocate
from tests.reference.knapsack import instances
from tests.sampling import examples, sweep

many = settings(max_examples=examples(100), deadline=None)


@many
@given(instances())
def test_the_smallest_cap_is_exact(instance):
    costs, errors, budget = instance
    cap = smallest_cap(costs, errors, budget)
    expected = reference.smallest_cap(costs, errors, budget)
    assert cap == (np.inf if expected is None else expected)
    if np.isfinite(cap):
        assert reference.cap_is_feasible(costs, errors, budget, cap)
        assert not reference.cap_is_feasible(costs, errors, budget, np.nextafter(cap, -1))


def profile(name, candidates, d_in=10, d_out=10):
    """Return a layer from (kept parameters, weight error, reconstruction error), dense first."""
    return LayerProfile(
        name=name,
        d_in=d_in,
        d_out=d_out,
        input_group=name,
        tokens=7,
        candidates=tuple(
            Candidate(
                kind="factored" if index else "dense",
                rank=1 if index else None,
                nnz=1 if index else None,
                kept_parameters=kept,
                stored_bytes=2 * kept,
                weight_error=weight_error,
                reconstruction_error=reconstruction_error,
            )
            for index, (kept, weight_error, reconstruction_error) in enumerate(candidates)
        ),
    )


LAYERS = (
    profile("q", [(100, 0.0, 0.0), (80, 0.2, 0.3), (60, 0.3, 0.35), (50, 0.29, 0.5), (40, 0.5, 0.4)]),
    profile("k", [(100, 0.0, 0.0), (80, 0.05, 0.2), (60, 0.2, 0.5), (40, 0.4, 0.9)]),
    profile("down", [(200, 0.0, 0.0), (160, 0.3, 0.1), (120, 0.35, 0.2)], d_out=20),
)


def feasible_choices(profiles, budget):
    for choice in itertools.product(*(range(len(layer.candidates)) for layer in profiles)):
        chosen = [layer.candidates[index] for layer, index in zip(profiles, choice, strict=True)]
        if sum(candidate.kept_parameters for candidate in chosen) <= budget:
            yield chosen


@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.1, 0.25, 0.3, 0.45, 0.5])
@pytest.mark.parametrize("slack", [0.0, 0.01, 1.0])
def test_weight_objective_is_the_least_sum_under_the_cap(ratio, slack):
    allocation = allocate(LAYERS, ratio, objective="weight", cap_slack=slack)
    budget = parameter_budget(400, ratio)
    smallest = min(max(c.weight_error for c in chosen) for chosen in feasible_choices(LAYERS, budget))
    sums = [
        sum(c.weight_error for c in chosen)
        for chosen in feasible_choices(LAYERS, budget)
        if max(c.weight_error for c in chosen) <= smallest * (1 + slack)
    ]
    chosen = [layer.candidates[index] for layer, index in zip(LAYERS, allocation.choices, strict=True)]
    assert allocation.budget == budget
    assert allocation.compressible == 400
    assert allocation.kept == sum(c.kept_parameters for c in chosen) <= budget
    assert allocation.total_error == pytest.approx(min(sums))
    assert allocation.total_error == pytest.approx(sum(c.weight_error for c in chosen))
    assert allocation.lower_bound == allocation.total_error
    assert allocation.proven
    if ratio:
        assert allocation.smallest_alpha * allocation.reference_error == pytest.approx(smallest)
        assert allocation.alpha == pytest.approx(allocation.smallest_alpha * (1 + slack))
        assert all(c.weight_error <= allocation.alpha * allocation.reference_error * (1 + 1e-12) for c in chosen)


@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.25, 0.3, 0.5])
def test_whitened_objective_is_the_least_sum_of_squares(ratio):
    allocation = allocate(LAYERS, ratio, objective="whitened", cap_slack=0.01)
    choices = feasible_choices(LAYERS, parameter_budget(400, ratio))
    assert allocation.total_error == pytest.approx(
        min(sum(c.reconstruction_error**2 for c in chosen) for chosen in choices)
    )
    assert (allocation.reference_error, allocation.smallest_alpha, allocation.alpha) == (None, None, None)


def test_reference_error_is_the_mean_under_uniform_compression():
    # At 0.3 a layer of 100 may keep 70, one of 200 may keep 140.
    assert allocate(LAYERS, 0.3, objective="weight", cap_slack=0.0).reference_error == pytest.approx(
        (0.3 + 0.2 + 0.35) / 3
    )
    # At 0.5 the last layer has no candidate of 100 or fewer, so its smallest is used.
    assert allocate(LAYERS, 0.5, objective="weight", cap_slack=0.0).reference_error == pytest.approx(
        (0.29 + 0.4 + 0.35) / 3
    )


def test_at_ratio_zero_every_layer_stays_dense():
    allocation = allocate(LAYERS, 0.0, objective="weight", cap_slack=0.01)
    assert allocation.choices == (0, 0, 0)
    assert allocation.kept == allocation.budget == 400
    assert (allocation.reference_error, allocation.smallest_alpha, allocation.alpha) == (0, 0, 0)


@pytest.mark.parametrize("objective", ["weight", "whitened"])
def test_an_unreachable_ratio_names_one_that_can_be_typed(objective):
    with pytest.raises(InfeasibleBudgetError, match=r"at most 0\.4975 of their parameters") as error:
        allocate(
            (*LAYERS[:2], profile("down", [(200, 0.0, 0.0), (121, 0.35, 0.2)], d_out=20)),
            0.5,
            objective=objective,
            cap_slack=0.0,
        )
    assert error.value.nearest_ratio == 0.4975
    assert "0.4975" in str(error.value)


@many
@given(
    st.lists(st.lists(st.integers(0, 10**6), min_size=1, max_size=3), min_size=1, max_size=4),
    st.sampled_from(["weight", "whitened"]),
)
def test_the_nearest_ratio_works_when_typed_back(kept, objective):
    profiles = [
        profile(f"layer{index}", [(10**6, 0, 0), *((size, 0.5, 0.5) for size in sizes)], d_in=1000, d_out=1000)
        for index, sizes in enumerate(kept)
    ]
    nearest = Allocator(profiles, objective="whitened", cap_slack=0.0).reachable_ratio
    assert 0 <= nearest < 1
    assert nearest == float(f"{nearest:.4f}")
    allocation = allocate(profiles, nearest, objective=objective, cap_slack=0.0)
    assert allocation.kept <= allocation.budget
    if nearest < 0.9998:
        with pytest.raises(InfeasibleBudgetError) as error:
            allocate(profiles, round(nearest + 1e-4, 4), objective=objective, cap_slack=0.0)
        assert error.value.nearest_ratio == nearest


@pytest.mark.parametrize(("ratio", "slack"), [(1.0, 0.0), (-0.1, 0.0), (float("nan"), 0.0), (0.3, -1.0)])
def test_an_out_of_range_setting_is_refused(ratio, slack):
    with pytest.raises(InvalidConfigError, match="out of range"):
        allocate(LAYERS, ratio, objective="weight", cap_slack=slack)


def test_an_empty_list_of_layers_is_refused():
    with pytest.raises(InvalidConfigError, match="no layer"):
        allocate([], 0.3, objective="weight", cap_slack=0.0)


def test_an_allocation_survives_storage_and_fills_the_report():
    allocation = allocate(LAYERS, 0.3, objective="weight", cap_slack=0.01)
    assert Allocation.model_validate_json(allocation.model_dump_json()) == allocation
    report = allocation_report(allocation)
    assert report.measure == allocation.budget_unit
    assert report.model_dump(exclude={"measure"}).items() <= allocation.model_dump().items()


@pytest.mark.parametrize("budget_unit", ["parameters", "bytes"])
@pytest.mark.parametrize("objective", ["weight", "whitened"])
def test_the_frontier_equals_the_allocation_at_each_ratio(objective, budget_unit):
    kept = {"objective": objective, "cap_slack": 0.01, "budget_unit": budget_unit, "itemsize": 2}
    points = Allocator(LAYERS, **kept).frontier(step / 20 for step in range(20))
    # The smallest candidates keep 40, 40 and 120 of 400.
    assert [point.ratio for point in points] == [step / 20 for step in range(11)]
    for point in points:
        allocation = allocate(LAYERS, point.ratio, **kept)
        picked = [candidate for _, candidate in chosen(LAYERS, allocation, itemsize=2)]
        assert point.error == allocation.total_error
        assert point.kept_parameters == sum(candidate.kept_parameters for candidate in picked)
        assert point.stored_bytes == sum(candidate.stored_bytes for candidate in picked)
    assert (points[0].error, points[0].kept_parameters) == (0, 400)


@pytest.mark.parametrize("step", sweep([40], soak=[1]))
def test_an_error_bound_gives_the_smallest_model_within_it(step):
    allocator = Allocator(LAYERS, objective="whitened", cap_slack=0.0)
    errors = functools.cache(lambda ratio: allocator.allocate(ratio).total_error)
    every = [number / 10_000 for number in range(0, 5001, step)]
    for most in (0.0, 1e-9, 0.0101, 0.1, 0.2, 0.3, 1.0, 9.0):
        found = allocator.within_error(most)
        assert found.total_error <= most
        beyond = [round(found.ratio + number / 10_000, 4) for number in range(1, 11)]
        assert not [ratio for ratio in {*every, *beyond} if found.ratio < ratio <= 0.5 and errors(ratio) <= most]
        assert found.ratio in every or step > 1


@pytest.mark.parametrize("most", [-1.0, float("nan"), float("inf")])
def test_an_out_of_range_error_bound_is_refused(most):
    with pytest.raises(InvalidConfigError, match="error bound"):
        Allocator(LAYERS, objective="whitened", cap_slack=0.0).within_error(most)


@pytest.mark.slow
def test_nothing_heavier_than_numpy_is_loaded():
    program = "import sys, rocket_core.allocation; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "numpy" in loaded
    assert not {"torch", "scipy", "numba", "transformers"} & set(loaded)
