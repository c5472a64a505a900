"""Synchronisation policies in simulated time: closed forms and laws."""

from __future__ import annotations

import dataclasses

import pytest

from coordinator.simulation.replicas import ExchangeCosts, over_allreduce, pipeline_steps, simulate_policy
from facility.exchange.messages.emulation import Emulation
from facility.exchange.messages.sync import SyncSettings
from tests.simulation.layouts import uniform
from tests.simulation.plain_steps import plain_steps

COSTS = ExchangeCosts(parameter_bytes=100e6, bytes_per_second=5e9)
STALLS = {0.1: Emulation(probability=0.1, seconds=0.1), 0.2: Emulation(probability=0.1, seconds=0.2)}


def run(policy: str, emulation: Emulation, steps: int = 300, **knobs):
    settings = SyncSettings(policy=policy, **knobs)
    return simulate_policy(settings, 8, plain_steps(emulation, 0.07, 0.14), steps=steps, costs=COSTS, keep_log=True)


@pytest.mark.parametrize("seconds", [0.1, 0.2])
def test_allreduce_waits_for_the_worst_of_eight(seconds):
    # P(at least one of 16 draws) = 0.8147, P(some worker meets two) = 0.0773; a ring of 8 sends 7/4 of the bytes.
    base = 0.21 + 7 / 4 * 100e6 / 5e9
    expected = 8 / (base + seconds * (0.8147 + 0.0773))
    assert run("allreduce", STALLS[seconds], 1500).updates_per_second == pytest.approx(expected, rel=0.02)


def test_alone_nobody_waits():
    result = simulate_policy(SyncSettings(), 1, plain_steps(STALLS[0.2], 0.07, 0.14), steps=3000, costs=COSTS)
    assert result.updates_per_second == pytest.approx(1 / (0.21 + 0.2 * 0.2), rel=0.02)
    assert result.exchange_seconds == result.wait_seconds == 0


def test_bound_of_one_is_allreduce():
    assert run("partial_reduce", STALLS[0.2], bound=1).updates_per_second == pytest.approx(
        run("allreduce", STALLS[0.2]).updates_per_second, rel=0.01
    )


@pytest.mark.slow
def test_order_of_policies_under_stalls():
    rates = [
        run("allreduce", STALLS[0.2]),
        run("adpsgd_blocking", STALLS[0.2]),
        run("partial_reduce", STALLS[0.2], bound=5),
        run("partial_reduce", STALLS[0.2], bound=10),
    ]
    values = [r.updates_per_second for r in rates]
    assert values == sorted(values)
    assert values[-1] > 1.4 * values[0]


def test_one_slow_replica_holds_everybody_only_in_lockstep():
    slow = Emulation(factors=(5.0,))
    lockstep, groups = run("allreduce", slow), run("partial_reduce", slow)
    assert groups.updates_per_second > 3.4 * lockstep.updates_per_second
    assert run("partial_reduce", slow, relay=0.0).updates_per_second > 3.5 * lockstep.updates_per_second
    assert groups.rounds[0] < 0.4 * max(groups.rounds)
    assert len(set(lockstep.rounds)) == 1


def test_the_budget_counts_the_updates_of_all_together():
    result = run("partial_reduce", STALLS[0.1], 100)
    assert 800 <= result.updates < 800 + 2 * 8
    each = run("partial_reduce", STALLS[0.1], 100, progress="each")
    assert set(each.rounds) == {100}


def test_a_wave_keeps_within_its_staleness():
    result = run("wave", Emulation(factors=(5.0,)), 100, every=5, staleness=1)
    assert max(result.rounds) - min(result.rounds) <= 5 * (1 + 2)
    free = run("wave", Emulation(factors=(5.0,)), 100, every=5, staleness=1000)
    assert free.updates_per_second > 3 * result.updates_per_second


def test_local_steps_exchange_once_in_k():
    costs = dataclasses.replace(COSTS, decision_seconds=0.0)
    settings = SyncSettings(policy="local", every=10)
    result = simulate_policy(settings, 8, plain_steps(Emulation(), 0.07, 0.14), steps=100, costs=costs)
    ring = 7 / 4 * 100e6 / 5e9
    assert result.seconds == pytest.approx(100 * 0.21 + 10 * ring + ring)  # ten averages and the final one
    assert result.groups == 10


def test_building_groups_costs_and_the_cache_saves_it():
    costs = dataclasses.replace(COSTS, new_group_seconds=0.3)
    steps = plain_steps(STALLS[0.2], 0.07, 0.14)
    few = simulate_policy(SyncSettings(policy="partial_reduce", group_cache=2), 8, steps, steps=100, costs=costs)
    many = simulate_policy(SyncSettings(policy="partial_reduce", group_cache=999), 8, steps, steps=100, costs=costs)
    assert many.updates_per_second > few.updates_per_second


def test_pipelines_gain_from_partial_reduce_too():
    layout = uniform(4, 1, replicas=4, schedule="1f1b", forward=0.07, backward=0.14)
    step = pipeline_steps(layout, Emulation(probability=0.1, seconds=1.0), 200)
    assert over_allreduce(SyncSettings(policy="partial_reduce"), 4, step, steps=200, costs=COSTS) > 1.1


def test_same_seed_same_groups():
    first, again = run("partial_reduce", STALLS[0.1], 50), run("partial_reduce", STALLS[0.1], 50)
    assert [g.members for g in first.log] == [g.members for g in again.log]
