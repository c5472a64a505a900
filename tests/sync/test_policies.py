"""Laws of the synchronisation policies, on real gloo processes."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from facility.exchange.scheduling.policies import POLICIES
from facility.sync.connect import connect_replicas
from facility.sync.protocol import ReplicaRank
from facility.sync.runtime.replica import Context
from tests.cases import slow_but
from tests.sync.fleet import run_fleet, settings_of
from tests.sync.quadratic import SHAPES, make_parameters, solve, target

STEPS = 12


def by_hand(weights: list[float], steps: int = STEPS) -> torch.Tensor:
    """Gradient descent on the weighted mean of the replicas' losses: x' - c = 0.9 (x - c) about the weighted target."""
    start = torch.cat([p.detach().reshape(-1) for p in make_parameters()])
    total = sum(weights)
    centre = sum(w / total * target(r) for r, w in enumerate(weights))
    return centre + 0.9**steps * (start - centre)


@pytest.mark.parametrize("policy", slow_but(sorted(POLICIES.built_in)[::2], sorted(POLICIES.built_in)))
def test_every_policy_ends_with_one_model(policy: str):
    # Where not all average together, much depends on who is ahead: a pause keeps a busy core from running one replica
    # to its end first.
    pause = 0.005 if policy in ("adpsgd", "partial_reduce") else 0.0
    steps = 4 * STEPS  # how far one waits behind another (waves most) fades with them
    results = run_fleet(partial(solve, pause=pause), 3, settings_of(policy=policy, every=4), steps)
    for result in results[1:]:
        assert result["vector"] == results[0]["vector"], "the final average is the same bits everywhere"
    assert sum(r["steps"] for r in results) >= 3 * steps
    if policy not in ("diloco",):  # its outer momentum overshoots
        got = torch.tensor(results[0]["vector"])
        assert torch.all((got - by_hand([1, 1, 1], steps)).abs() < 0.5)
    updates = results[0]["report"]["updates"]
    assert sum(updates.values()) == sum(r["steps"] for r in results)


@pytest.mark.parametrize("policy", ["allreduce", "central_ps", "sharded_ps"])
@pytest.mark.parametrize("announce", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradient_policies_equal_one_process_with_the_whole_batch(policy: str, announce: bool):
    weights = (1.0, 3.0, 2.0)
    settings = settings_of(policy=policy, bucket_bytes=64)
    results = run_fleet(partial(solve, samples=weights, announce=announce), 3, settings, STEPS)
    for result in results:
        torch.testing.assert_close(torch.tensor(result["vector"]), by_hand(list(weights)), rtol=1e-5, atol=1e-5)
        if policy == "allreduce" and announce:
            assert result["report"]["overlapped_here"] > 0
    report = results[0]["report"]
    assert report["aborted"] == 0 and report["samples"] == {"0": 12.0, "1": 36.0, "2": 24.0}


@pytest.mark.parametrize("step", ["common", "own"])
def test_partial_reduce_with_a_bound_of_one_is_all_reduce(step: str):
    """For SGD, averaging after a step from equal parameters is the step of the averaged gradient."""
    settings = settings_of(policy="partial_reduce", bound=1, debias=False, step=step)
    for result in run_fleet(solve, 3, settings, STEPS):
        torch.testing.assert_close(torch.tensor(result["vector"]), by_hand([1, 1, 1]), rtol=1e-5, atol=1e-5)
        assert result["steps"] == STEPS


@pytest.mark.parametrize("state", ["auto", pytest.param("keep", marks=pytest.mark.slow)])
def test_common_steps_of_everybody_are_all_reduce_with_adamw_too(state: str):
    """And from the third meeting on they send what all-reduce sends, where moments are averaged."""
    work = partial(solve, optimizer_name="adamw")
    expected = run_fleet(work, 3, settings_of(policy="allreduce"), STEPS)[0]["vector"]
    settings = settings_of(policy="partial_reduce", bound=1, debias=False, optimizer_state=state, bucket_bytes=64)
    results = run_fleet(work, 3, settings, STEPS)
    for result in results:
        assert result["report"]["announced_early_here"] == STEPS
        torch.testing.assert_close(torch.tensor(result["vector"]), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    if state == "auto":
        own = [torch.tensor(r["local"]) for r in results]  # before the final average
        assert torch.equal(own[0], own[1]) and torch.equal(own[0], own[2])
        steps, elements = STEPS, sum(p.numel() for p in make_parameters())
        counters = 2 * len(make_parameters())  # AdamW's `step`, a number per parameter: counted with the moments
        sent = results[0]["report"]["bytes_here"]
        volumes = 2 + 4 + (steps - 2) + 2  # first, second, then gradients; the final average is in float64
        assert sent == pytest.approx(2 * 2 / 3 * 4 * elements * volumes, rel=0.02 + counters / elements)


@pytest.mark.parametrize("relay", [1000.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_common_steps_are_what_the_log_says(tmp_path, relay: float):
    """Replayed group by group: parameters averaged equally, gradients by weight, the step scaled by `influence`.

    What an earlier group left counts as one more member, and a pair's mean of parameters moves both.
    """
    import json

    settings = settings_of(policy="partial_reduce", bound=4, relay=relay)
    results = run_fleet(partial(solve, log=tmp_path, pause=(0.04, 0.005, 0.007)), 3, settings, 20)
    lines = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()]
    held = [torch.cat([p.detach().reshape(-1) for p in make_parameters()])] * 3
    owed = [torch.zeros_like(h) for h in held]
    left: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    kinds = set()
    for line in sorted(lines, key=lambda line: line["group"]):
        members, partner = line["members"], line["partner"]
        volumes = line["bytes"] // (4 * held[0].numel())  # a pair's exchange is an even number of them
        gradient = sum(w * (held[m] - target(m)) for m, w in zip(members, line["weights"], strict=True))
        first = held[members[0]] - target(members[0])
        for m in members:
            held[m], owed[m] = held[m] + owed[m], torch.zeros_like(held[m])
        mean = torch.stack([held[m] for m in members]).mean(0)
        handed_on = partner is not None and (volumes == 3 if len(members) == 1 else volumes % 2 == 1)
        if partner is not None:
            kept, before = left[line["after"]]
            gradient = (len(members) * gradient + (before if handed_on else first)) / (len(members) + 1)
            if handed_on and len(members) == 1:
                left[line["after"]] = (mean + kept) / 2, before
                mean, owed[partner] = (mean + kept) / 2, owed[partner] + (mean - kept) / 2
        kinds |= {(len(members), handed_on)}
        left[line["group"]] = mean, gradient
        if line["kind"] == "group":
            mean = mean - 0.1 * line["influence"] * gradient
        for m in members:
            held[m] = mean
    assert ((1, True) in kinds) == bool(relay) and (1, False) in kinds
    torch.testing.assert_close(torch.tensor(results[0]["vector"]), held[0], rtol=1e-4, atol=1e-4)
    lengths = {line["influence"] for line in lines if line["kind"] == "group"}
    assert len(lengths) > 1 and results[0]["steps"] < results[1]["steps"], "one replica made fewer updates"


def test_common_steps_differ_from_own_steps_under_adamw():
    """The mean of normalised steps is not the normalised step of the mean: why gradients are averaged."""
    work = partial(solve, optimizer_name="adamw")
    own, common = (
        run_fleet(work, 3, settings_of(policy="partial_reduce", bound=1, debias=False, step=step), STEPS)[0]["vector"]
        for step in ("own", "common")
    )
    assert (torch.tensor(own) - torch.tensor(common)).abs().max() > 1e-3


def test_local_averaging_is_weighted_by_samples_and_exact_for_uneven_replicas():
    """With an average every step, local SGD is all-reduce with the same weights."""
    weights = (1.0, 3.0, 2.0)
    for result in run_fleet(partial(solve, samples=weights), 3, settings_of(policy="local", every=1), STEPS):
        torch.testing.assert_close(torch.tensor(result["vector"]), by_hand(list(weights)), rtol=1e-5, atol=1e-5)


def test_diloco_with_a_plain_outer_step_is_local():
    options = {"every": 4, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
    local = run_fleet(solve, 2, settings_of(policy="local", every=4), STEPS)
    diloco = run_fleet(solve, 2, settings_of(policy="diloco", **options), STEPS)
    torch.testing.assert_close(torch.tensor(local[0]["vector"]), torch.tensor(diloco[0]["vector"]))


def test_diloco_by_hand():
    """Two outer steps with momentum 0.5 and rate 1 on the means of the replicas (Algorithm 1, Nesterov)."""
    options = {"every": 2, "outer_learning_rate": 1.0, "outer_momentum": 0.5}
    (result, _) = run_fleet(solve, 2, settings_of(policy="diloco", **options), 4)
    outer = torch.cat([p.detach().reshape(-1) for p in make_parameters()])
    momentum, centre = torch.zeros_like(outer), torch.full_like(outer, 1.5)
    for _ in range(2):
        gradient = outer - (centre + 0.81 * (outer - centre))
        momentum = 0.5 * momentum + gradient
        outer = outer - (gradient + 0.5 * momentum)
    torch.testing.assert_close(torch.tensor(result["vector"]), outer, rtol=1e-5, atol=1e-5)


def test_the_final_average_is_exact():
    """Replicas that never averaged: the end is the float64 mean of what they held, rounded once."""
    settings = settings_of(policy="local", every=1000, weights="equal")
    results = run_fleet(partial(solve, seed_by_rank=True), 3, settings, 5)
    # `local` averages what is left at the end; three different starts, contracted about three different targets.
    starts = [torch.cat([p.detach().reshape(-1) for p in make_parameters(seed=r)]) for r in range(3)]
    mean = sum(target(r).double() + 0.9**5 * (starts[r].double() - target(r).double()) for r in range(3)) / 3
    for result in results:
        torch.testing.assert_close(torch.tensor(result["vector"]).double(), mean, rtol=1e-6, atol=1e-6)
    assert results[0]["vector"] == results[1]["vector"] == results[2]["vector"]


@pytest.mark.parametrize("policy", ["partial_reduce", "adpsgd", "wave"])
def test_fast_replicas_do_more_and_the_report_says_who_did_what(policy: str):
    settings = settings_of(policy=policy, every=2, staleness=8, bound=0)
    results = run_fleet(partial(solve, pause=(0.01, 0.01, 0.08)), 3, settings, 20)
    steps = [r["steps"] for r in results]
    assert steps[2] < sum(steps[:2]) / 2  # one of them may have begun late on a busy machine
    assert 60 <= sum(steps) <= 60 + 3 * 2
    assert results[0]["report"]["updates"] == {str(r): s for r, s in enumerate(steps)}


def test_positions_of_a_replica_follow_one_decision():
    """Two replicas of two ranks: each position averages with its own kind only."""
    settings = settings_of(policy="partial_reduce", bound=1, debias=False)
    results = run_fleet(partial(solve, positions=2), 4, settings, STEPS)
    for position in range(2):
        start = torch.cat([p.detach().reshape(-1) for p in make_parameters(seed=position)])
        expected = 1.5 + 0.9**STEPS * (start - 1.5)
        for rank in (position, 2 + position):
            torch.testing.assert_close(torch.tensor(results[rank]["vector"]), expected, rtol=1e-5, atol=1e-5)
    assert [r["steps"] for r in results] == [STEPS] * 4


@pytest.mark.parametrize("policy", ["allreduce", "adpsgd", "wave", "diloco"])
def test_positions_under_the_other_families(policy: str):
    results = run_fleet(partial(solve, positions=2), 4, settings_of(policy=policy, every=3), 6)
    assert results[0]["vector"] == results[2]["vector"] != results[1]["vector"] == results[3]["vector"]
    assert results[0]["steps"] == results[1]["steps"] and results[2]["steps"] == results[3]["steps"]


@pytest.mark.parametrize("state", ["keep", "average", "reset"])
def test_optimizer_state_follows_the_stated_policy(state: str):
    settings = settings_of(policy="local", every=3, optimizer_state=state)
    first, second = run_fleet(partial(solve, optimizer_name="adamw"), 2, settings, 6)
    assert first["vector"] == second["vector"]


def test_a_single_replica_is_no_sync():
    parameters = make_parameters()
    context = Context(
        settings=settings_of(policy="partial_reduce"),
        place=ReplicaRank(replica=0, replicas=1),
        parameters=parameters,
        steps=3,
        store=None,  # type: ignore[arg-type]
    )
    sync = connect_replicas(context)
    before = [p.detach().clone() for p in parameters]
    steps = 0
    while sync.wants_more():
        sync.before_step(1), sync.reduce_gradients(1), sync.after_step(1)
        steps += 1
    sync.finish()
    assert steps == 3 and all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert len(parameters) == len(SHAPES) and sync.report()["updates"] == 3


def test_a_line_per_group_and_a_trace(tmp_path):
    import json

    settings = settings_of(policy="partial_reduce")
    report = run_fleet(partial(solve, log=tmp_path, pause=0.005), 3, settings, 8)[0]["report"]
    lines = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()]
    assert len(lines) == report["groups"] + report["alone"] and lines[-1]["kind"] == "final"
    for line in lines:
        assert set(line) >= {"members", "staleness", "waits", "bytes", "seconds", "reason"}
        assert len(line["members"]) == len(line["weights"]) == len(line["waits"]) and line["ended"] == "well"
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["tid"] for e in trace} == {0, 1, 2} and all(e["ph"] in "MXi" for e in trace)
