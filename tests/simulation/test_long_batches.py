"""Thousands of micro-batches are simulated with hundreds, and a planner keeps its seconds with them."""

from dataclasses import replace

import pytest

from coordinator.planning.emit import plan_on, predicted
from coordinator.planning.joint.plan import plan_joint
from coordinator.planning.stop import Stop
from coordinator.problem.problem import SharedLink
from coordinator.simulation.pipelines import iteration, steady
from coordinator.simulation.pipelines.plans import simulate
from tests.planning.cases import problem


@pytest.mark.parametrize(
    ("schedule", "virtual", "transport"),
    [
        ("1f1b", 1, "streaming"),
        ("1f1b", 1, "blocking"),
        ("gpipe", 1, "blocking"),
        ("interleaved_1f1b", 2, "streaming"),
        ("interleaved_zero_bubble", 2, "blocking"),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_a_long_batch_takes_what_its_shorter_ones_continue_to(schedule, virtual, transport, shared, monkeypatch):
    monkeypatch.setattr(steady, "NODES", 400)
    one = problem(devices=4, batch_samples=240)
    if shared:
        link = SharedLink(name="wide", bandwidth_bytes_per_second=3e8, sources=(0, 1), destinations=(2, 3))
        one = replace(one, links=replace(one.links, shared=(link,)))
    units = len(one.units)
    cuts = [units * stage // (2 * virtual) for stage in range(2 * virtual + 1)]
    plan = plan_on(
        one,
        [(0, 1), (2, 3)],
        list(zip(cuts, cuts[1:], strict=False)),
        micro_batches=[240, 240] if shared else [240, 230],
        micro_batch_samples=1,
        schedule=schedule,
        sync="allreduce",
        virtual_stages=virtual,
    )
    whole = simulate(one, plan, transport=transport)
    short = simulate(one, plan, transport=transport, continued=True)
    assert short.engine == whole.engine == ("events" if shared else "longest path")
    assert short.iteration_seconds == pytest.approx(whole.iteration_seconds, rel=1e-3 if shared else 1e-9)
    assert short.sync_seconds == pytest.approx(whole.sync_seconds, rel=1e-9, abs=whole.iteration_seconds / 240)
    assert short.memory_bytes == pytest.approx(whole.memory_bytes)
    assert short.in_flight_micro_batches == whole.in_flight_micro_batches


def test_a_planner_simulates_no_more_of_a_batch_of_thousands(monkeypatch):
    seen = []
    for name in ("template", "order"):
        made = getattr(iteration, name)
        monkeypatch.setattr(iteration, name, lambda *a, _made=made: seen.append(a[1:4]) or _made(*a))
    one = problem(devices=4, batch_samples=100_000, micro_batch_samples=[1])
    plan = plan_joint(one, Stop(0.5))
    assert max(stages * virtual * count for stages, virtual, count in seen) <= 2 * steady.NODES
    assert sum(plan.replica_micro_batches) == 100_000
    fields = predicted(one, plan)
    work = min(sum(load.seconds for load in fields["loads"]) / 4, fields["predicted_seconds"])
    assert plan.predicted_seconds == fields["predicted_seconds"] >= work > 0
