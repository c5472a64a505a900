"""Joint planning: laws on small problems, surrogate against simulator, gains on unequal devices, re-planning."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coordinator.planning.chain import Infeasible
from coordinator.planning.emit import plan_on, simulated_seconds
from coordinator.planning.joint.bound import joint_bound
from coordinator.planning.joint.cost import Cost, Layouts
from coordinator.planning.joint.every import every_layout
from coordinator.planning.joint.plan import one_pipeline, plan_joint
from coordinator.planning.joint.starts import best_cuts, even_cuts, even_share
from coordinator.planning.replan import replan
from coordinator.planning.solve import placed, solve
from coordinator.planning.stop import Stop
from coordinator.problem.problem import Problem
from coordinator.problem.read import problem_from_json
from coordinator.simulation.pipelines.plans import simulate
from facility.exchange.errors import ConfigurationError
from tests.cases import slow_but
from tests.planning.cases import heterogeneous, problem, whole


def check(one: Problem, plan) -> None:
    """Every layer once (the plan's own validation), memory kept, prediction reproducible, bound below it."""
    plan.validate(world_size=len(one.devices), layers=len(one.units) - 2)
    result = simulate(one, plan)
    assert result.iteration_seconds == pytest.approx(plan.predicted_seconds, rel=1e-9)
    for device, used in result.memory_bytes.items():
        assert used <= one.memory[device] * (1 + 1e-9)
    assert plan.lower_bound_seconds <= plan.predicted_seconds
    assert sum(plan.replica_micro_batches) * plan.micro_batch_samples == one.batch_samples
    assert plan.reasons and plan.tried


@pytest.mark.parametrize("seed", range(4))
def test_laws_on_small_problems(seed):
    one = problem(devices=4 + seed, blocks=6 + 2 * seed, seed=seed)
    plan = solve(one, Stop(60, iterations=2), seed=seed)
    check(one, plan)
    for other, _ in one_pipeline(one):
        assert plan.predicted_seconds <= simulated_seconds(one, other) * (1 + 1e-9)


def test_the_bound_holds_for_any_layout():
    rng = np.random.default_rng(0)
    one = problem(devices=6, blocks=8)
    bound = joint_bound(one).seconds
    for _ in range(20):
        grid = rng.permutation(6).reshape(3, 2)
        cuts = even_cuts(len(one.units), 3)
        plan = plan_on(
            one,
            grid.tolist(),
            list(zip(cuts[:-1], cuts[1:], strict=True)),
            micro_batches=[8, 8],
            micro_batch_samples=1,
            schedule="gpipe",
            sync="allreduce",
        )
        assert simulate(one, plan).iteration_seconds >= bound


@pytest.mark.parametrize(("schedule", "tolerance"), [("gpipe", 1e-9), ("1f1b", 0.15)])
@pytest.mark.parametrize("sync", ["allreduce", "sharded_ps", "central_ps"])
def test_surrogate_agrees_with_the_simulator(schedule, tolerance, sync):
    """GPipe exactly while nothing is shared, all else to 15 %, on random grids."""
    rng = np.random.default_rng(1)
    one = problem(devices=6, blocks=8, syncs=[sync], batch_samples=32)
    cost = Cost(one, 3, 2, 1, schedule)
    for _ in range(10):
        line = rng.permutation(6)
        cuts = np.array([0, *np.sort(rng.choice(np.arange(1, 10), 2, replace=False)), 10])
        share = rng.multinomial(28, [0.5, 0.5]) + 2
        mine = float(cost.seconds(Layouts(line[None], cuts[None], share[None]))[0])
        plan = plan_on(
            one,
            line.reshape(3, 2).tolist(),
            list(zip(cuts[:-1], cuts[1:], strict=True)),
            micro_batches=share.tolist(),
            micro_batch_samples=1,
            schedule=schedule,
            sync=sync,
        )
        result = simulate(one, plan)
        if schedule == "gpipe":
            bare = replace(one, units=tuple(replace(u, parameter_bytes=0) for u in one.units))
            mine_bare = float(Cost(bare, 3, 2, 1, schedule).seconds(Layouts(line[None], cuts[None], share[None]))[0])
            assert mine_bare == pytest.approx(simulate(bare, plan).pipeline_seconds, rel=tolerance)
        assert mine == pytest.approx(result.iteration_seconds, rel=0.15)


@pytest.mark.parametrize("seed", range(10))
def test_split_for_a_grid_is_brute_force(seed):
    rng = np.random.default_rng(seed)
    one = problem(devices=6, blocks=5, seed=seed)
    cost = Cost(one, 3, 2, 1, "1f1b")
    grid = rng.permutation(6).reshape(3, 2)
    share = even_share(16, 2)
    seconds = cost.forward + cost.backward

    def value(cuts) -> float:
        return max(seconds[d, cuts[s + 1]] - seconds[d, cuts[s]] for s in range(3) for d in grid[s])

    best = min(value((0, a, b, 7)) for a in range(1, 6) for b in range(a + 1, 7))
    found = best_cuts(cost, grid, share)
    assert found is not None and value(found) == pytest.approx(best)


@pytest.mark.parametrize("name", slow_but(["universities"], ["universities", "datacenter"]))
def test_gain_over_placing_first_and_splitting_after(name):
    """At least 1.27 times faster in simulation, same schedule, shape, agreement; all cases in tests/bench/plan.py."""
    one = replace(heterogeneous(name), stages=(8,), replicas=(8,))
    before = placed(one, 8, 8, Stop(60, iterations=0), split="best")
    after = plan_joint(one, Stop(600, iterations=2))
    check(one, after)
    assert before.predicted_seconds / after.predicted_seconds >= 1.27


def test_memory_forces_more_stages():
    roomy = plan_joint(problem(devices=4, blocks=6), Stop(60, iterations=1))
    raw = whole(devices=4, blocks=6, stages=[1, 2, 3, 4])
    for device in raw["devices"]:
        device["memory_gigabytes"] = 0.6
    one = problem_from_json(raw)
    assert isinstance(one, Problem)
    tight = plan_joint(one, Stop(60, iterations=2))
    check(one, tight)
    assert tight.stages == 4 and roomy.predicted_seconds <= tight.predicted_seconds
    for device in raw["devices"]:
        device["memory_gigabytes"] = 0.2
    with pytest.raises(Infeasible, match="short by"):
        plan_joint(problem_from_json(raw), Stop(60, iterations=1))


@pytest.mark.parametrize("seed", range(6))
def test_of_few_layouts_the_best_is_found_whatever_the_time(seed):
    """Three unlike devices, some with room for a part: all layouts are simulated here."""
    rng = np.random.default_rng(seed)
    raw = whole(devices=3, blocks=2, seed=seed, batch_samples=int(rng.integers(1, 4)), syncs=["allreduce"])
    for device in raw["devices"]:
        device |= {"memory_gigabytes": float(rng.choice([0.25, 0.5, 8])), "slowdown": float(rng.choice([1, 1.5, 3]))}
    raw["devices"][seed % 3]["memory_gigabytes"] = 8
    one = problem_from_json(raw)
    assert isinstance(one, Problem)
    least = np.inf
    for stages, replicas in ((1, 1), (1, 2), (1, 3), (2, 1), (3, 1)):
        if replicas > one.batch_samples:
            continue
        found = every_layout(Cost(one, stages, replicas, 1, "1f1b"))
        assert found is not None
        for line, cuts, share in zip(found.line, found.cuts, found.share, strict=True):
            for schedule in one.schedules:
                plan = plan_on(
                    one,
                    line[: stages * replicas].reshape(stages, replicas).tolist(),
                    list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)),
                    micro_batches=share.tolist(),
                    micro_batch_samples=1,
                    schedule=schedule,
                    sync="allreduce",
                )
                least = min(least, simulated_seconds(one, plan))
    plan, again = plan_joint(one, Stop(30, 1)), plan_joint(one, Stop(60), seed=5)
    assert plan.predicted_seconds == pytest.approx(least, rel=1e-9)
    assert (plan.grid, plan.stage_units, plan.schedule) == (again.grid, again.stage_units, again.schedule)


def test_seconds_that_are_all_zero_make_a_plan_not_a_traceback():
    free = [unit | {"forward_ms": 0, "backward_ms": 0} for unit in whole()["units"]]
    assert plan_joint(problem(units=free), Stop(0.2, 1)).predicted_seconds == 0.0


def test_every_layout_is_there_once():
    cost = Cost(problem(devices=4, blocks=3, batch_samples=5), 2, 2, 1, "gpipe")
    found = every_layout(cost)
    assert found is not None
    rows = {tuple(row) for row in np.concatenate([found.line[:, :4], found.cuts, found.share], axis=1).tolist()}
    assert len(rows) == len(found.line) == 4 * 3 * 2 // 2 * 4 * 4
    assert all(sorted(line) == [0, 1, 2, 3] for line in found.line.tolist()) and (found.share.sum(axis=1) == 5).all()
    many = problem(devices=40, blocks=3, batch_samples=64)
    assert every_layout(Cost(many, 2, 20, 1, "gpipe")) is None
    assert every_layout(Cost(problem(devices=40, blocks=3, batch_samples=40), 1, 40, 1, "gpipe")) is not None


def test_equal_devices_on_a_fast_network_become_replicas():
    raw = whole(devices=4, blocks=6)
    for device in raw["devices"]:
        device["slowdown"] = 1.0
    raw["links"] = {
        "latency_ms": [[0.001] * 4] * 4,
        "bandwidth_gbit_per_s": [[1000.0] * 4] * 4,
    }
    plan = plan_joint(problem_from_json(raw), Stop(60, iterations=1))
    assert (plan.stages, plan.replicas) == (1, 4)


def test_a_slow_replica_takes_fewer_micro_batches():
    raw = whole(devices=2, blocks=4, stages=[1], replicas=[2], batch_samples=30)
    raw["devices"][0]["slowdown"], raw["devices"][1]["slowdown"] = 1.0, 2.0
    plan = plan_joint(problem_from_json(raw), Stop(60, iterations=2))
    by_device = {plan.grid[0][r]: count for r, count in enumerate(plan.replica_micro_batches)}
    assert by_device == {0: 20, 1: 10}


def test_a_shared_uplink_counts():
    """Two pipelines over one uplink are slower than over two."""
    raw = whole(devices=4, blocks=4, stages=[2], replicas=[2])
    free = plan_joint(problem_from_json(raw), Stop(60, iterations=1))
    raw["links"]["shared"] = [
        {"name": "wan", "bandwidth_gbit_per_s": 0.05, "sources": [0, 1], "destinations": [2, 3]},
        {"name": "wan back", "bandwidth_gbit_per_s": 0.05, "sources": [2, 3], "destinations": [0, 1]},
    ]
    one = problem_from_json(raw)
    assert isinstance(one, Problem)
    shared = plan_joint(one, Stop(60, iterations=1))
    check(one, shared)
    assert shared.predicted_seconds > free.predicted_seconds


def test_links_are_not_compressed_as_the_trainer_sends_activations_as_they_are():
    raw = whole(devices=2, blocks=4, stages=[2], codecs=[{"name": "int8", "ratio": 0.5}])
    raw["links"]["bandwidth_gbit_per_s"] = [[1, 0.05], [0.05, 1]]
    assert plan_joint(problem_from_json(raw), Stop(60, iterations=1)).compressed_links == ()


def test_interleaving_is_chosen_where_it_fills_the_bubble():
    raw = whole(devices=4, blocks=14, stages=[4], replicas=[1], batch_samples=4)
    raw["schedules"] = ["1f1b", "interleaved_1f1b"]
    for device in raw["devices"]:
        device["slowdown"] = 1.0
    raw["units"][0]["forward_ms"], raw["units"][0]["backward_ms"] = 10, 20
    raw["units"][2]["forward_ms"], raw["units"][2]["backward_ms"] = 10, 20
    raw["links"] = {"latency_ms": [[0.001] * 4] * 4, "bandwidth_gbit_per_s": [[1000.0] * 4] * 4}
    one = problem_from_json(raw)
    assert isinstance(one, Problem)
    plan = plan_joint(one, Stop(60, iterations=1))
    check(one, plan)
    assert plan.schedule == "interleaved_1f1b" and plan.virtual_stages >= 2
    only = plan_joint(replace(one, schedules=("1f1b",)), Stop(60, iterations=1))
    assert plan.predicted_seconds < only.predicted_seconds


def test_a_schedule_that_was_not_asked_for_is_told():
    """Five micro-batches are no whole rounds of two stages."""
    asked = {"devices": 2, "blocks": 4, "batch_samples": 5, "stages": [2]}
    plan = plan_joint(problem(**asked, schedules=["interleaved_1f1b"]), Stop(0.5, 1))
    told = [reason for reason in plan.reasons if "schedules holds interleaved_1f1b alone" in reason]
    assert plan.schedule == "1f1b" and len(told) == 1 and "faster than 1f1b" in told[0]
    assert not any("alone" in reason for reason in plan_joint(problem(**asked), Stop(0.5, 1)).reasons)


def test_the_same_seed_gives_the_same_plan():
    one = problem(devices=6, blocks=8)
    first, second = (plan_joint(one, Stop(600, iterations=2), seed=3) for _ in range(2))
    assert first.grid == second.grid and first.stage_units == second.stage_units


def test_replanning_moves_only_for_the_stated_gain():
    one = problem(devices=4, blocks=8, stages=[2, 4])
    now = plan_joint(one, Stop(60, iterations=3))
    kept = replan(one, Stop(60, iterations=1), now, seed=1, least_gain=0.05)
    assert (kept.grid, kept.stage_units) == (now.grid, now.stage_units)
    assert kept.reasons[0].startswith("kept")
    busiest = max(now.loads, key=lambda load: load.seconds).device
    slower = tuple(
        replace(device, slowdown=device.slowdown * 8) if n == busiest else device
        for n, device in enumerate(one.devices)
    )
    moved = replan(replace(one, devices=slower), Stop(60, iterations=2), now, least_gain=0.05)
    assert moved.reasons[0].startswith("moved") and moved.grid != now.grid or moved.stage_units != now.stage_units
    gone = problem(devices=2, blocks=8)
    assert "does not fit any more" in replan(gone, Stop(60, iterations=1), now).reasons[0]


def test_a_plan_of_another_batch_or_of_a_shape_that_is_not_allowed_is_not_kept():
    now = plan_joint(problem(devices=4, blocks=8), Stop(60, iterations=1))
    larger = replan(problem(devices=4, blocks=8, batch_samples=64), Stop(60, iterations=1), now)
    assert "does not fit any more" in larger.reasons[0]
    assert sum(larger.replica_micro_batches) * larger.micro_batch_samples == 64
    others = [stages for stages in (1, 2, 3, 4) if stages != now.stages]
    assert replan(problem(devices=4, blocks=8, stages=others), Stop(60, iterations=1), now).stages in others


def test_replanning_weighs_the_objective():
    raw = whole(devices=3, blocks=6)
    for device, slowdown in zip(raw["devices"], (1.0, 4.0, 4.0), strict=True):
        device["slowdown"] = slowdown
    fast = plan_joint(problem_from_json(raw), Stop(60, iterations=1))
    hours = problem_from_json(raw | {"objective": "device_hours"})
    cheap = replan(hours, Stop(60, iterations=1), fast)
    assert (fast.world_size, cheap.world_size) == (3, 1)
    assert cheap.reasons[0].startswith("moved") and "device-hours" in cheap.reasons[0]
    kept = replan(hours, Stop(60, iterations=1), cheap)
    assert kept.reasons[0].startswith("kept")
    assert (kept.cost, kept.objective, kept.gap) == (cheap.cost, cheap.objective, cheap.gap)
    tokens = problem_from_json(raw | {"objective": "tokens_per_second", "sample_tokens": 128})
    kept = replan(tokens, Stop(60, iterations=1), fast)
    assert kept.cost == pytest.approx(16 * 128 / kept.predicted_seconds)


@pytest.mark.parametrize("method", ["joint", "place", "exact", "dynamic", "even"])
@pytest.mark.parametrize("sizes", [[2, 3], [4, 9]])
def test_every_plan_trains_the_whole_batch(method, sizes):
    plan = solve(problem(batch_samples=9, micro_batch_samples=sizes), Stop(60, iterations=1), method=method)
    assert sum(plan.replica_micro_batches) * plan.micro_batch_samples == 9


@pytest.mark.parametrize(("devices", "blocks", "samples"), [(20, 4, 2), (16, 1, 1), (32, 4, 4)])
def test_more_devices_than_the_batch_has_work_for_stay_idle(devices, blocks, samples):
    plan = plan_joint(problem(devices=devices, blocks=blocks, batch_samples=samples), Stop(60, iterations=0))
    assert sum(plan.replica_micro_batches) == samples and plan.world_size < devices


def test_shapes_that_cannot_be():
    with pytest.raises(ConfigurationError, match="not a multiple"):
        plan_joint(problem(micro_batch_samples=[3]), Stop(1))
    with pytest.raises(ConfigurationError, match="no allowed shape"):
        plan_joint(problem(stages=[9]), Stop(1))
    with pytest.raises(ConfigurationError, match="the problem allows"):
        solve(problem(stages=[2]), Stop(1), stages=3)
