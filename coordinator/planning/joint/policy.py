"""Selects whether the replicas of the best plan wait for each other, where devices stall at random.

In lockstep every replica waits for the one that stalls; `partial_reduce` and `adpsgd` let replicas proceed in groups or
pairs (Miao et al., "SDPipe", PVLDB 16(9), 2023; Lian et al. 2018, arXiv 1710.06952). Both are simulated with the
facility's own schedulers under the stalls given in the problem; their updates per second are compared with those of
all-reduce under the same stalls. An update of a group is worth no more than one of all replicas, so a policy is chosen
for a clear gain only.
"""

from __future__ import annotations

from dataclasses import replace

from coordinator.problem.problem import Problem
from coordinator.simulation.pipelines.plans import layout_of
from coordinator.simulation.replicas import ExchangeCosts, over_allreduce, pipeline_steps
from facility.exchange.messages.plan import Plan, Sync
from facility.exchange.messages.sync import SyncSettings

LEAST_GAIN = 0.1
"""Share of updates a second that a policy must add."""
STEPS = 40
"""Steps of each replica that are simulated."""
DRAWS = 200_000
"""Computations of one replica that may stall, over its unlike steps: fewer of these where each is long."""


def policy_of(problem: Problem, plan: Plan) -> tuple[Plan, str]:
    """The plan with the policy that is worth it, and why; the plan itself and "" where lockstep stays."""
    if plan.replicas < 2 or not problem.policies:
        return plan, ""
    if plan.stages * plan.virtual_stages == 1 and len(set(plan.replica_micro_batches)) > 1:
        return plan, "replicas wait for each other: without stages, unequal micro-batches train by all-reduce only"
    layout = layout_of(problem, plan)
    pairs = [(a, b) for row in plan.grid for a in row for b in row if a != b]
    costs = ExchangeCosts(
        parameter_bytes=float(max(layout.gradient_bytes)),
        bytes_per_second=float(min(problem.bandwidth[a, b] for a, b in pairs)),
        latency_seconds=float(max(problem.latency[a, b] for a, b in pairs)),
        fixed_seconds=problem.runtime.agreement_seconds,
    )
    draws = DRAWS // (2 * len(plan.stage_units) * max(plan.replica_micro_batches))
    step = pipeline_steps(layout, problem.stalls, min(STEPS, max(2, draws)))
    gains = {
        name: over_allreduce(SyncSettings(policy=name), plan.replicas, step, steps=STEPS, costs=costs)
        for name in problem.policies
    }
    best = max(gains, key=lambda name: gains[name])
    listed = ", ".join(f"{name} {gain:.2f}" for name, gain in gains.items())
    if gains[best] < 1 + LEAST_GAIN:
        return plan, f"replicas wait for each other: updates a second over all-reduce would be {listed}"
    return (
        replace(plan, sync=Sync(name=best)),
        "replicas go on without waiting for all: updates a second over all-reduce, under the stalls given, are "
        f"{listed}",
    )
