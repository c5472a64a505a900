"""Laws of the joint planner under hypothesis: layers, memory, numbering, bounds, objectives, what running costs."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.planning import emit
from coordinator.planning.chain import Infeasible
from coordinator.planning.emit import plan_on, simulated_seconds
from coordinator.planning.joint.bound import joint_bound
from coordinator.planning.joint.cost import Cost, Layouts
from coordinator.planning.joint.plan import plan_joint
from coordinator.planning.solve import solve
from coordinator.planning.stop import Stop
from coordinator.problem.problem import Problem
from coordinator.problem.read import problem_from_json
from coordinator.problem.runtime import Runtime
from coordinator.simulation.pipelines.plans import layout_of, simulate
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.plan import Plan
from tests.examples import examples
from tests.planning.cases import problem, whole

SEEDS = st.integers(0, 100_000)
DEAR = Runtime(
    transport="blocking",
    overlap=False,
    pass_seconds=0.004,
    replica_forward_seconds=0.003,
    replica_backward_seconds=0.002,
    agreement_seconds=0.05,
    step_seconds=0.01,
)


def random_problem(seed: int) -> Problem:
    """Two to six devices, any modes, memory that mostly suffices, some with running costs."""
    rng = np.random.default_rng(seed)
    raw = whole(devices=int(rng.integers(2, 7)), blocks=int(rng.integers(3, 9)), seed=seed)
    for device in raw["devices"]:
        device["memory_gigabytes"] = float(rng.choice([0.8, 1.5, 8.0]))
    raw["syncs"] = [["allreduce"], ["sharded_ps"], ["central_ps", "allreduce"]][rng.integers(3)]
    raw["schedules"] = [["gpipe"], ["1f1b", "gpipe"], ["1f1b", "interleaved_1f1b"]][rng.integers(3)]
    raw["local_steps"] = int(rng.choice([1, 1, 4]))
    made = problem_from_json(raw)
    assert isinstance(made, Problem)
    return replace(made, runtime=DEAR) if rng.random() < 0.5 else made


def random_plan(one: Problem, seed: int) -> Plan:
    """Any layout of the problem."""
    rng = np.random.default_rng(seed)
    devices, units = len(one.devices), len(one.units)
    stages = int(rng.integers(1, min(devices, units) + 1))
    replicas = int(rng.integers(1, devices // stages + 1))
    grid = rng.permutation(devices)[: stages * replicas].reshape(stages, replicas)
    cuts = [0, *sorted(rng.choice(np.arange(1, units), stages - 1, replace=False).tolist()), units]
    share = rng.multinomial(one.batch_samples - replicas, np.full(replicas, 1 / replicas)) + 1
    schedule = [s for s in one.schedules if not s.startswith("interleaved")][0]
    return plan_on(
        one,
        grid.tolist(),
        list(zip(cuts, cuts[1:], strict=False)),
        micro_batches=share.tolist(),
        micro_batch_samples=1,
        schedule=schedule,
        sync=one.syncs[int(rng.integers(len(one.syncs)))],
    )


@given(seed=SEEDS)
@settings(max_examples=examples(120), deadline=None)
def test_no_layout_beats_the_bound(seed):
    one = random_problem(seed)
    bound = joint_bound(one)
    seconds = simulated_seconds(one, random_plan(one, seed))
    assert bound.seconds <= seconds * (1 + 1e-9)
    assert bound.value <= seconds * (1 + 1e-9) and (bound.reason or not bound.value)


@given(seed=SEEDS)
@example(seed=132)
@example(seed=15032)
@settings(max_examples=examples(12), deadline=None)
def test_every_layer_once_memory_kept_and_never_slower_than_even(seed):
    one = random_problem(seed)
    try:
        plan = plan_joint(one, Stop(600, iterations=1), seed=seed)
    except Infeasible as error:
        assert "short" in str(error) or "memory" in str(error)
        return
    covered = [unit for first, end in plan.stage_units for unit in range(first, end)]
    assert covered == list(range(len(one.units)))
    result = simulate(one, plan)
    assert all(used <= one.memory[device] * (1 + 1e-9) for device, used in result.memory_bytes.items())
    assert result.iteration_seconds == pytest.approx(plan.predicted_seconds)
    assert plan.lower_bound_seconds <= plan.predicted_seconds
    try:
        even = solve(one, Stop(600), method="even")
    except Infeasible:
        return
    assert plan.predicted_seconds <= even.predicted_seconds * (1 + 1e-9)


@given(seed=SEEDS)
@settings(max_examples=examples(60), deadline=None)
def test_the_cost_does_not_know_the_numbers_of_devices(seed):
    one = random_problem(seed)
    plan = random_plan(one, seed)
    order = np.random.default_rng(seed + 1).permutation(len(one.devices))  # device n is called order[n] now
    back = np.argsort(order)
    links = replace(
        one.links,
        latency_seconds=tuple(map(tuple, np.array(one.links.latency_seconds)[np.ix_(back, back)].tolist())),
        bandwidth_bytes_per_second=tuple(
            map(tuple, np.array(one.links.bandwidth_bytes_per_second)[np.ix_(back, back)].tolist())
        ),
    )
    other = replace(one, devices=tuple(one.devices[n] for n in back), links=links)
    grid = tuple(tuple(int(order[d]) for d in row) for row in plan.grid)
    turned = replace(plan, grid=grid, spans=(), device_ids=())
    assert simulated_seconds(other, turned) == pytest.approx(simulated_seconds(one, plan), rel=1e-12)
    assert joint_bound(other).seconds == pytest.approx(joint_bound(one).seconds, rel=1e-9)


@given(seed=SEEDS)
@settings(max_examples=examples(40), deadline=None)
def test_running_costs_only_add_and_both_engines_agree_on_them(seed):
    from coordinator.simulation.pipelines.iteration import simulate_layout

    one = replace(random_problem(seed), runtime=Runtime(), local_steps=1)
    plan = random_plan(one, seed)
    ideal, dear = (simulated_seconds(r, plan) for r in (one, replace(one, runtime=DEAR)))
    assert dear > ideal or not np.isfinite(ideal)
    layout = layout_of(replace(one, runtime=replace(DEAR, agreement_seconds=0.01)), plan)
    by_events, by_path = (simulate_layout(layout, engine=e).iteration_seconds for e in ("events", "longest path"))
    assert by_events == pytest.approx(by_path, rel=1e-9)


def test_agreeing_is_paid_once_a_unit_after_the_last_backward():
    """By hand: two replicas of one stage, four units, negligible bytes: 4 collectives of 50 ms after the backward."""
    raw = whole(devices=2, blocks=2, stages=[1], replicas=[2], batch_samples=2)
    for device in raw["devices"]:
        device["slowdown"] = 1.0
    raw["links"] = {"latency_ms": [[0, 0]] * 2, "bandwidth_gbit_per_s": [[1e6, 1e6]] * 2}
    raw["runtime"] = {
        "overlap": False,
        "agreement_ms": 50,
        "step_ms": 7,
        "pass_ms": 2,
        "replica_forward_ms": 1,
        "replica_backward_ms": 3,
    }
    one = problem_from_json(raw)
    assert isinstance(one, Problem)
    plan = plan_on(
        one, [[0, 1]], [(0, 4)], micro_batches=[1, 1], micro_batch_samples=1, schedule="gpipe", sync="allreduce"
    )
    computing = 0.001 + 0.001 + 2 * 0.03 + 0.012
    assert simulated_seconds(one, plan) == pytest.approx(computing + 2 * 0.002 + 4 * 0.004 + 4 * 0.05 + 0.007, rel=1e-3)
    mine = Cost(one, 1, 2, 1, "gpipe").seconds(Layouts(np.array([[0, 1]]), np.array([[0, 4]]), np.array([[1, 1]])))
    assert float(mine[0]) == pytest.approx(simulated_seconds(one, plan), rel=1e-6)
    parameters_server = replace(plan, sync=replace(plan.sync, name="sharded_ps"))
    assert simulated_seconds(one, plan) - simulated_seconds(one, parameters_server) == pytest.approx(0.016, rel=1e-2)


@pytest.mark.parametrize("shared", [False, True])
def test_many_layouts_of_many_replicas_that_each_serve_a_part_cost_what_single_ones_do_in_little_memory(shared):
    """Sixteen layouts of 300 replicas: of all pairs of all layouts a single array would take 11.5 MB."""
    count, groups = 300, 16
    uplink = {"name": "u", "bandwidth_gbit_per_s": 20, "sources": [0, 1, 2], "destinations": [3, 4]}
    raw = whole(devices=count, blocks=2, batch_samples=count, syncs=["sharded_ps"])
    raw["links"]["shared"] = [uplink] if shared else []
    one = problem_from_json(raw)
    assert isinstance(one, Problem)
    cost, rng = Cost(one, 1, count, 1, "1f1b"), np.random.default_rng(0)
    lines = np.array([rng.permutation(count) for _ in range(groups)])
    layouts = Layouts(lines, np.array([[0, 4]] * groups), np.ones((groups, count), dtype=int))
    tracemalloc.start()
    found = cost.seconds(layouts)
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()
    plan = plan_on(
        one,
        [lines[0].tolist()],
        [(0, 4)],
        micro_batches=[1] * count,
        micro_batch_samples=1,
        schedule="1f1b",
        sync="sharded_ps",
    )
    assert shared or found[0] == pytest.approx(simulate(one, plan).iteration_seconds)
    assert np.ptp(found) < 1e-6 * found[0]  # all devices agree, in whichever order


def test_dear_collectives_make_a_pipeline_of_what_would_be_replicas():
    raw = whole(devices=4, blocks=8, batch_samples=16)
    for device in raw["devices"]:
        device["slowdown"] = 1.0
    raw["links"] = {"latency_ms": [[0.01] * 4] * 4, "bandwidth_gbit_per_s": [[100.0] * 4] * 4}
    free = plan_joint(problem_from_json(raw), Stop(60, iterations=1))
    assert free.replicas == 4
    dear = plan_joint(problem_from_json(raw | {"runtime": {"agreement_ms": 400}}), Stop(60, iterations=1))
    assert dear.replicas == 1 and dear.stages == 4


def test_device_hours_leave_slow_devices_idle_and_tokens_a_second_do_not():
    raw = whole(devices=3, blocks=6)
    for device, slowdown in zip(raw["devices"], (1.0, 4.0, 4.0), strict=True):
        device["slowdown"] = slowdown
    fast = plan_joint(problem_from_json(raw), Stop(60, iterations=1))
    cheap = plan_joint(problem_from_json(raw | {"objective": "device_hours"}), Stop(60, iterations=1))
    assert (fast.world_size, cheap.world_size) == (3, 1)
    assert cheap.cost == pytest.approx(cheap.predicted_seconds / 3600) and cheap.gap is not None
    raw["devices"][0]["price"] = 20.0
    other = plan_joint(problem_from_json(raw | {"objective": "device_hours"}), Stop(60, iterations=1))
    assert 0 not in {device for row in other.grid for device in row}
    many = plan_joint(
        problem_from_json(raw | {"objective": "tokens_per_second", "sample_tokens": 128}), Stop(60, iterations=1)
    )
    assert many.cost == pytest.approx(16 * 128 / many.predicted_seconds) and "more is better" in many.objective


def test_replicas_stop_waiting_for_each_other_only_where_devices_stall():
    raw = whole(devices=4, blocks=6, stages=[1], replicas=[4], policies=["partial_reduce", "adpsgd"])
    for device in raw["devices"]:
        device["slowdown"] = 1.0
    raw["links"] = {"latency_ms": [[0.01] * 4] * 4, "bandwidth_gbit_per_s": [[1000.0] * 4] * 4}
    steady = plan_joint(problem_from_json(raw), Stop(60, iterations=1))
    assert steady.sync.name == "allreduce" and any("replicas wait" in reason for reason in steady.reasons)
    stalls = {"probability": 0.1, "seconds": 1.0}
    stalling = plan_joint(problem_from_json(raw | {"stalls": stalls}), Stop(60, iterations=1))
    assert stalling.sync.name in ("partial_reduce", "adpsgd") and stalling.micro_batches == steady.micro_batches
    assert stalling.lower_bound_seconds <= stalling.predicted_seconds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": ["anarchy"]}, "policies holds 'anarchy'"),
        ({"stalls": {"probability": 2}}, "probability is 2"),
        ({"stalls": {"chance": 2}}, "unknown key stalls.chance"),
        ({"objective": "beauty"}, "objective is 'beauty', expected one of iteration_seconds"),
        ({"objective": "tokens_per_second"}, "needs sample_tokens"),
        ({"runtime": {"transport": "pigeon"}}, "runtime.transport is 'pigeon'"),
        ({"runtime": {"overlap": "no"}}, "runtime.overlap is 'no'"),
        ({"runtime": {"agreement_days": 1}}, "unknown unit 'days' of agreement"),
        ({"runtime": {"agreement_ms": -1}}, "agreement_seconds is -0.001"),
        ({"runtime": {"patience_ms": 1}}, "unknown key runtime.patience_ms"),
        ({"runtime": []}, r"runtime is \[\]"),
    ],
)
def test_bad_objective_or_runtime(change, message):
    with pytest.raises(ConfigurationError, match=message):
        problem_from_json(whole() | change)


def test_a_small_problem_is_unchanged_by_an_ideal_runtime():
    one = problem()
    assert one.runtime == Runtime() and one.objective == "iteration_seconds"


def test_a_layout_that_exceeds_a_memory_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    """The search meets mostly such where memory is short: of 20,000 units each took a second of timing."""
    raw = whole(devices=4, blocks=6)
    raw["devices"][1]["memory_gigabytes"] = 0.5
    one = problem_from_json(raw)
    assert isinstance(one, Problem)
    plan = plan_on(
        one,
        [(n,) for n in range(4)],
        [(0, 2), (2, 4), (4, 6), (6, 8)],
        micro_batches=[16],
        micro_batch_samples=1,
        schedule="1f1b",
        sync="allreduce",
    )
    held, limit = simulate(one, plan).memory_bytes[1], one.memory[1]
    assert held > limit
    monkeypatch.setattr(emit, "simulate", lambda *given, **how: pytest.fail("timed"))
    assert simulated_seconds(one, plan) == np.inf


def test_fields_of_units_are_gathered_once():
    """A search asks for them with every layout that it times."""
    one = problem()
    for name in ("activation_bytes", "forward_seconds"):
        assert one.per_unit(name) is one.per_unit(name)
        assert one.per_unit(name).tolist() == [getattr(unit, name) for unit in one.units]
        with pytest.raises(ValueError, match="read-only"):
            one.per_unit(name)[0] = 1
    assert replace(one, units=one.units[1:]).per_unit("forward_seconds").shape == (len(one.units) - 1,)


def test_replicas_with_nothing_to_exchange_are_done_with_their_last_backward():
    """Without gradients there is nothing to send, whatever the number of pieces; with few bytes next to nothing."""
    raw = whole(devices=4, blocks=6)
    without, little = ([dict(unit, parameter_megabytes=size) for unit in raw["units"]] for size in (0, 1e-9))
    found = []
    for units in (without, little):
        one = problem_from_json(raw | {"units": units})
        assert isinstance(one, Problem)
        plan = plan_on(
            one,
            [(0, 1), (2, 3)],
            [(0, 4), (4, 8)],
            micro_batches=[9, 7],
            micro_batch_samples=1,
            schedule="1f1b",
            sync="allreduce",
        )
        flat = replace(one, links=replace(one.links, latency_seconds=((0.0,) * 4,) * 4))
        found.append(simulate(flat, plan).iteration_seconds)
    assert found[0] == pytest.approx(found[1], rel=1e-6) and found[0] <= found[1]
