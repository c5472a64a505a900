"""Placement under the published cost: golden cases at any seed and numbering, exact parts against brute force, laws."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.planning.placement.cost import (
    Matchings,
    best_order,
    bottleneck_matching,
    costs_of,
    grid_cost,
    placement_bound,
)
from coordinator.planning.placement.place import plan_place
from coordinator.planning.stop import Stop
from coordinator.problem.placement import PlacementProblem
from coordinator.problem.read import problem_from_json
from tests.cases import slow_but
from tests.examples import examples
from tests.planning.cases import BEST_KNOWN, published
from tests.reproductions.evolutionary import evolve


def case(name: str, *, renumber: int | None = None, noise: int | None = None, tile: int = 1) -> PlacementProblem:
    """A published case, renumbered, with every directed link disturbed, or with every device `tile` times."""
    raw = json.loads(published(name).read_text())
    for key, spread in (("delay_ms", (0.7, 1.4)), ("bandwidth_gbit_per_s", (0.6, 1.2))):
        matrix = np.kron(np.array(raw[key]), np.ones((tile, tile)))
        if renumber is not None:
            order = np.random.default_rng(renumber).permutation(len(matrix))
            matrix = matrix[np.ix_(order, order)]
        if noise is not None:
            matrix = matrix * np.random.default_rng(noise).uniform(*spread, matrix.shape)
        raw[key] = matrix.tolist()
    raw["replicas"] *= tile
    made = problem_from_json(raw)
    assert isinstance(made, PlacementProblem)
    return made


def random_case(seed: int, stages: int = 3, replicas: int = 2) -> PlacementProblem:
    rng = np.random.default_rng(seed)
    count = stages * replicas
    return PlacementProblem(
        latency_seconds=tuple(map(tuple, rng.uniform(0, 0.2, (count, count)).tolist())),
        bandwidth_bytes_per_second=tuple(map(tuple, rng.choice([1e8, 2e8, 1e9], (count, count)).tolist())),
        stages=stages,
        replicas=replicas,
        gradient_bytes=3e8,
        activation_bytes=2e8,
    )


def valid(problem: PlacementProblem, grid: np.ndarray) -> None:
    assert grid.shape == (problem.stages, problem.replicas)
    assert sorted(grid.ravel().tolist()) == list(range(problem.stages * problem.replicas))


@pytest.mark.parametrize("name", BEST_KNOWN)
@pytest.mark.parametrize("seed", [0, 7])
def test_published_optimum_at_any_seed(name, seed):
    problem = case(name)
    found = plan_place(problem, Stop(60, iterations=0), seed=seed)
    grid = np.array(found.grid)
    valid(problem, grid)
    assert found.cost <= BEST_KNOWN[name] + 5e-5
    assert grid_cost(costs_of(problem), grid) == pytest.approx(found.cost, rel=1e-12)
    assert found.lower_bound <= found.cost
    assert sum(found.parts.values()) == pytest.approx(found.cost)


@pytest.mark.parametrize("name", BEST_KNOWN)
def test_published_optimum_under_any_numbering(name):
    found = plan_place(case(name, renumber=11), Stop(60, iterations=0), seed=1)
    assert found.cost <= BEST_KNOWN[name] + 5e-5


def test_the_spot_optimum_is_proven():
    found = plan_place(case("spot"), Stop(60, iterations=0))
    assert found.lower_bound == pytest.approx(found.cost, rel=1e-9)


def test_the_hand_layout_costs_what_the_facts_say():
    """Device i on rank i: one machine a pipeline; the matching in the cost agrees with the identity columns."""
    problem = case("worldwide")
    grid = np.arange(64).reshape(8, 8).T
    assert grid_cost(costs_of(problem), grid) == pytest.approx(49.2184, abs=5e-5)


@pytest.mark.parametrize("seed", slow_but([0], range(4)))
def test_brute_force_on_six_devices(seed):
    problem = random_case(seed)
    costs = costs_of(problem)
    best = min(grid_cost(costs, np.array(p).reshape(3, 2)) for p in itertools.permutations(range(6)))
    found = plan_place(problem, Stop(60, iterations=2), seed=seed)
    assert found.cost == pytest.approx(best, rel=1e-9)
    assert placement_bound(costs) <= best * (1 + 1e-9)


@given(seed=st.integers(0, 100_000), size=st.integers(1, 6))
@settings(max_examples=examples(80), deadline=None)
def test_bottleneck_matching_is_brute_force(seed, size):
    weights = np.random.default_rng(seed).choice([1.0, 2.0, 3.0, 5.0, 8.0], (size, size))
    value, match = bottleneck_matching(weights)
    rows = np.arange(size)
    assert sorted(match.tolist()) == rows.tolist()
    assert value == weights[rows, match].max()
    assert value == min(weights[rows, list(p)].max() for p in itertools.permutations(range(size)))


@given(seed=st.integers(0, 100_000), size=st.integers(2, 6))
@settings(max_examples=examples(60), deadline=None)
def test_best_order_is_brute_force(seed, size):
    weights = np.random.default_rng(seed).uniform(1, 9, (size, size))
    weights = weights + weights.T
    value, order = best_order(weights)
    paths = [sum(weights[a, b] for a, b in itertools.pairwise(p)) for p in itertools.permutations(range(size))]
    assert value == pytest.approx(min(paths))
    assert value == pytest.approx(sum(weights[a, b] for a, b in itertools.pairwise(order)))


def test_many_stages_are_ordered_without_held_karp():
    weights = np.abs(np.arange(16)[:, None] - np.arange(16)[None, :]).astype(float)
    shuffled = np.random.default_rng(0).permutation(16)
    value, order = best_order(weights[np.ix_(shuffled, shuffled)])
    assert value == 15 and sorted(order) == list(range(16))


def test_what_is_reported_is_what_is_emitted():
    """The published search reported one cost and emitted another layout; here each is emitted and re-costed."""
    costs = costs_of(case("regional", renumber=3, noise=4))
    rng = np.random.default_rng(0)
    for _ in range(10):
        stages = [tuple(sorted(row)) for row in rng.permutation(64).reshape(8, 8).tolist()]
        matchings = Matchings(costs)
        assert grid_cost(costs, matchings.emit(stages)) == pytest.approx(matchings.cost(stages), rel=1e-12)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_placement():
    problem = random_case(1, stages=4, replicas=4)
    first, second = (plan_place(problem, Stop(300, iterations=1), seed=5, chains=8) for _ in range(2))
    assert first.grid == second.grid


@pytest.mark.slow
@pytest.mark.parametrize("name", ["regional", "spot"])
def test_not_worse_than_the_published_search_on_disturbed_asymmetric_links(name):
    """Its first 105 candidates against our structured starts alone; equal times are compared in tests/bench/plan.py."""
    problem = case(name, renumber=3, noise=4)
    costs = costs_of(problem)
    grid, cost, curve = evolve(costs, Stop(300, iterations=105), seed=0)
    valid(problem, grid)
    assert grid_cost(costs, grid) == pytest.approx(cost, rel=1e-12)  # mended: emitted as scored
    assert [c for _, _, c in curve] == sorted((c for _, _, c in curve), reverse=True)
    assert plan_place(problem, Stop(60, iterations=0)).cost <= cost


@pytest.mark.slow
@pytest.mark.parametrize("name", ["worldwide", "regional"])
def test_the_published_search_is_as_strong_as_the_original(name):
    """Longer than ten seconds: the original reached these optima after 224 to 314 and 125 to 212 candidates."""
    _, cost, curve = evolve(costs_of(case(name)), Stop(600, iterations=320), seed=0)
    assert cost <= BEST_KNOWN[name] + 5e-5
    assert curve[-1][1] <= 314


def test_larger_grids():
    problem = case("worldwide", renumber=1, noise=1, tile=2)
    found = plan_place(problem, Stop(60, iterations=0))
    valid(problem, np.array(found.grid))
    assert found.cost < grid_cost(costs_of(problem), np.arange(128).reshape(8, 16)) / 1.5
