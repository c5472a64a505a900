"""Layers to devices: oracles on thousands of small instances, laws, the published chain."""

from __future__ import annotations

import itertools
import time
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.planning.chain import Chain, Infeasible
from coordinator.planning.dynamic import plan_dynamic
from coordinator.planning.even import even_spans, plan_even
from coordinator.planning.exact.contiguous import plan_exact_in_order
from coordinator.planning.exact.free_order import _decide_by_counts, granular_bound, plan_exact
from coordinator.planning.exact.periodic import decide_periodic, find_period
from coordinator.problem.chain import ChainProblem
from coordinator.problem.read import read_problem
from facility.exchange.sizes import format_bytes
from tests.examples import examples
from tests.planning.cases import published


def brute_force(problem: ChainProblem, order: tuple[int, ...] | None = None) -> float:
    """The optimum by trying every next device and every span; infinite where none fits."""
    seconds, sizes, memory = problem.seconds, problem.unit_bytes, problem.memory_bytes
    units, devices = len(sizes), len(memory)

    @cache
    def best(first: int, used: int) -> float:
        if first == units:
            return 0.0
        value = np.inf
        candidates = [d for d in range(devices) if not used >> d & 1]
        if order is not None:  # a later device of the order may follow, earlier ones may not come back
            candidates = [d for n, d in enumerate(order) if not any(used >> e & 1 for e in order[n:])]
        for device in candidates:
            time = size = 0.0
            for end in range(first + 1, units + 1):
                time += seconds[device][end - 1]
                size += sizes[end - 1]
                if size > memory[device] + 1e-9:
                    break
                value = min(value, max(time, best(end, used | 1 << device)))
        return value

    return best(0, 0)


def random_problem(seed: int) -> ChainProblem:
    rng = np.random.default_rng(seed)
    devices, units = int(rng.integers(1, 5)), int(rng.integers(1, 8))
    cost = rng.integers(0, 6, units).astype(float)
    if rng.random() < 0.5:
        speed = rng.choice([1.0, 2.0, 3.0], devices)
        seconds = np.outer(speed, cost)
    else:
        seconds = rng.integers(0, 9, (devices, units)).astype(float)
    sizes = rng.integers(1, 5, units).astype(float)
    memory = rng.integers(2, 16, devices).astype(float) if rng.random() < 0.7 else np.full(devices, np.inf)
    return ChainProblem(
        seconds=tuple(map(tuple, seconds.tolist())),
        unit_bytes=tuple(sizes.tolist()),
        memory_bytes=tuple(memory.tolist()),
    )


def check(problem: ChainProblem, found, expected: float) -> None:
    chain = Chain(problem)
    assert chain.value(found.spans) == found.bottleneck  # every unit once, memory kept
    assert found.bottleneck == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert found.lower_bound <= found.bottleneck * (1 + 1e-9)
    assert granular_bound(chain) <= expected * (1 + 1e-9) + 1e-9


def test_exact_is_brute_force_on_thousands_of_small_instances():
    """1,500 instances, the order free; infeasible ones are refused."""
    infeasible = 0
    for seed in range(examples(1500)):
        problem = random_problem(seed)
        expected = brute_force(problem)
        if np.isinf(expected):
            infeasible += 1
            with pytest.raises(Infeasible):
                plan_exact(problem)
            continue
        found = plan_exact(problem)
        assert found.proven, seed
        check(problem, found, expected)
    assert 0.05 < infeasible / examples(1500) < 0.75


def test_exact_in_order_is_brute_force():
    for seed in range(examples(1500)):
        problem = random_problem(seed)
        order = tuple(np.random.default_rng(seed).permutation(len(problem.memory_bytes)).tolist())
        expected = brute_force(problem, order)
        if np.isinf(expected):
            with pytest.raises(Infeasible):
                plan_exact_in_order(problem, order)
        else:
            check(problem, plan_exact_in_order(problem, order), expected)


def periodic(seed: int) -> ChainProblem:
    """Prefix + (head, body, tail) x blocks + suffix on devices of few kinds."""
    rng = np.random.default_rng(seed)
    cost = [0.0, *rng.integers(1, 6, 3).tolist() * int(rng.integers(4, 7)), 0.1, 0.05]
    size = [3.0, *rng.integers(1, 4, 3).tolist() * ((len(cost) - 3) // 3), 0.5, 0.1]
    devices = int(rng.integers(2, 6))
    speed = rng.choice([1.0, 1.5, 2.5], devices)
    return ChainProblem(
        seconds=tuple(map(tuple, np.outer(speed, cost).tolist())),
        unit_bytes=tuple(map(float, size)),
        memory_bytes=tuple(rng.integers(8, 60, devices).astype(float).tolist()),
    )


def test_both_decision_procedures_agree_on_periodic_chains():
    """The integer programme over phases and the dynamic programme over counts, at values around the optimum."""
    decided = 0
    for seed in range(30):
        problem = periodic(seed)
        chain = Chain(problem)
        period = find_period(chain)
        assert period is not None and period.length in (1, 3)
        try:
            value = plan_exact(problem).bottleneck
        except Infeasible:
            continue
        for factor in (0.8, 1 - 1e-9, 1.0, 1.1):
            expected = _decide_by_counts(chain, value * factor)
            answer = decide_periodic(chain, period, value * factor, time.monotonic() + 200)
            if answer is not None:
                assert bool(answer) == bool(expected), (seed, factor)
                decided += 1
    assert decided > 50


@pytest.mark.parametrize("seed", range(40))
def test_spans_that_end_inside_the_prefix_or_begin_inside_the_suffix_are_decided(seed):
    """Dear units before and after the blocks, as of a model whose first layers are dense and the others experts."""
    rng = np.random.default_rng(seed)
    prefix, suffix = (rng.integers(3, 9, rng.integers(2, 4)) for _ in range(2))
    cost = np.concatenate([prefix, np.ones(rng.integers(24, 30)), suffix]).astype(float)
    chain = Chain(
        ChainProblem(
            seconds=tuple(map(tuple, np.outer(rng.uniform(1, 4, 5), cost).tolist())),
            unit_bytes=(1.0,) * len(cost),
            memory_bytes=tuple(rng.choice([8.0, 15.0, 1000.0], 5).tolist()),
        )
    )
    period = find_period(chain)
    assert period is not None and period.first > 1
    try:
        value = plan_exact(chain.problem).bottleneck
    except Infeasible:
        value = np.inf
    for factor in (0.9, 1 - 1e-9, 1 + 1e-9):
        answer = decide_periodic(chain, period, value * factor, time.monotonic() + 200)
        assert answer is not None and bool(answer) == bool(_decide_by_counts(chain, value * factor))


@given(seed=st.integers(0, 10_000))
@settings(max_examples=examples(60), deadline=None)
def test_one_more_device_never_hurts_the_exact_optimum(seed):
    problem = random_problem(seed)
    try:
        before = plan_exact(problem).bottleneck
    except Infeasible:
        return
    rng = np.random.default_rng(seed)
    row = tuple((np.array(problem.seconds[0]) * rng.choice([0.5, 1.0, 3.0])).tolist())
    wider = ChainProblem(
        seconds=(*problem.seconds, row),
        unit_bytes=problem.unit_bytes,
        memory_bytes=(*problem.memory_bytes, float(rng.integers(1, 9))),
    )
    assert plan_exact(wider).bottleneck <= before * (1 + 1e-9)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=examples(60), deadline=None)
def test_the_optimum_does_not_know_the_numbers_of_devices(seed):
    problem = random_problem(seed)
    order = np.random.default_rng(seed + 1).permutation(len(problem.memory_bytes))
    renumbered = ChainProblem(
        seconds=tuple(problem.seconds[d] for d in order),
        unit_bytes=problem.unit_bytes,
        memory_bytes=tuple(problem.memory_bytes[d] for d in order),
    )
    try:
        before = plan_exact(problem).bottleneck
    except Infeasible:
        with pytest.raises(Infeasible):
            plan_exact(renumbered)
        return
    assert plan_exact(renumbered).bottleneck == pytest.approx(before, rel=1e-9)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=examples(100), deadline=None)
def test_exact_in_order_beats_dynamic_and_dynamic_beats_even(seed):
    problem = random_problem(seed)
    chain = Chain(problem)
    try:
        dynamic = plan_dynamic(problem)
    except Infeasible:
        return
    chain.value(dynamic.spans)
    assert plan_exact_in_order(problem).bottleneck <= dynamic.bottleneck * (1 + 1e-9)
    try:
        even = plan_even(problem)
    except Infeasible:
        return
    assert dynamic.bottleneck <= even.bottleneck * (1 + 1e-9)


def test_even_spans():
    assert even_spans(7, 3) == [(0, 0, 3), (1, 3, 5), (2, 5, 7)]
    assert even_spans(2, 3) == [(0, 0, 1), (1, 1, 2)]


def test_dynamic_sheds_to_the_right_and_empties_a_slow_device():
    """Both were impossible in the published allocator: device 0 could not lose layers, nothing moved right."""
    seconds = np.outer([5.0, 1.0, 1.0], np.ones(9))
    problem = ChainProblem(
        seconds=tuple(map(tuple, seconds.tolist())), unit_bytes=(1.0,) * 9, memory_bytes=(np.inf,) * 3
    )
    found = plan_dynamic(problem)
    assert dict((d, e - f) for d, f, e in found.spans)[0] == 1
    assert found.bottleneck == 5.0


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ((3.0, 3.0), r"unit 0 \(a\) needs 4 B, but the largest memory, of device 'x', is 3 B: short by 1 B"),
        ((4.0, 3.0), "the units need 9 B in all, but 2 devices offer 7 B: short by 2 B"),
        ((5.0, 4.0), ""),
    ],
)
def test_infeasible_names_the_memory_that_is_short(memory, message):
    problem = ChainProblem(
        seconds=((1.0,) * 3,) * 2,
        unit_bytes=(4.0, 1.0, 4.0),
        memory_bytes=memory,
        unit_names=("a", "b", "c"),
        device_ids=("x", "y"),
    )
    if memory == (5.0, 4.0):
        plan_exact(problem)  # 4 + 1 | 4 fits
        problem = ChainProblem(seconds=((1.0,) * 3,) * 2, unit_bytes=(3.0, 3.0, 3.0), memory_bytes=memory)
        message = "no split into whole units fits: every device is short by 1 B"
    with pytest.raises(Infeasible, match=message):
        plan_exact(problem)


def test_shortage_is_the_true_one():
    """Three equal units on two devices: the larger must hold two, so 1 MB is missing."""
    problem = ChainProblem(seconds=((1.0,) * 3,) * 2, unit_bytes=(3e6,) * 3, memory_bytes=(5e6, 4e6))
    with pytest.raises(Infeasible, match="every device is short by 1 MB"):
        plan_exact(problem)


PUBLISHED = {  # bottleneck / fluid bound: given order, free order (both proven)
    "config-16": (1.165, 1.165),
    "config-32": (1.034, 1.034),
    "config-64": (1.091, 1.084),
    "stim-32": (1.054, 1.054),
    "stim-64": (1.058, 1.058),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_chain_of_483_units(name):
    problem = read_problem(published("sky-bert160"), devices=name)
    assert isinstance(problem, ChainProblem)
    chain = Chain(problem)
    begun = time.process_time()
    found = plan_exact(problem)
    assert time.process_time() - begun < 2.0
    assert found.proven
    given = plan_exact_in_order(problem)
    for assignment, expected in zip((given, found), PUBLISHED[name], strict=True):
        assert chain.value(assignment.spans) / chain.fluid_bound == pytest.approx(expected, abs=6e-4)


def test_published_chain_that_no_memory_holds():
    problem = read_problem(published("sky-bert160"), devices="stim-16")
    assert isinstance(problem, ChainProblem)
    missing = format_bytes(sum(problem.unit_bytes) - sum(problem.memory_bytes))
    with pytest.raises(Infeasible, match=f"short by {missing}"):
        plan_exact(problem)
    with pytest.raises(Infeasible, match="exceeds the memory of 13 devices"):
        plan_even(problem)


def test_periodic_chain_with_many_unlike_devices_is_proven():
    rng = np.random.default_rng(5)
    cost = np.array([0.0, *[3.0, 2.0, 2.5] * 40, 0.1])
    speed = rng.uniform(1, 2, 24)
    problem = ChainProblem(
        seconds=tuple(map(tuple, np.outer(speed, cost).tolist())),
        unit_bytes=(1.0,) * len(cost),
        memory_bytes=tuple(rng.integers(6, 12, 24).astype(float).tolist()),
    )
    assert plan_exact(problem, seconds=20).proven
    assert list(itertools.chain(*[range(f, e) for _, f, e in plan_exact(problem).spans])) == list(range(len(cost)))
