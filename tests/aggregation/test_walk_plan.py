"""Whose walks the mean holds: exact whoever takes part, against a simulation that knows every facility's walk."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from coordinator.aggregation.updates import Update
from coordinator.aggregation.walk_plan import Members, plan_walk, weights_in
from facility.exchange.checkpoints.checkpoint import Checkpoint
from facility.exchange.errors import CheckpointError
from facility.exchange.messages.drift import DriftReport
from tests.report.test_drift import report_with

NOWHERE = Checkpoint(directory=Path("/"), tensors={}, metadata={})


def update(name: str, *, rates: float = 0.1, corrected: bool = False, staleness: int = 0) -> Update:
    told = DriftReport(rates=rates, corrected=corrected, share=0.0, reason="")
    return Update(
        facility=name,
        directory=Path("/"),
        checkpoint=NOWHERE,
        report=report_with(told.to_json()),
        staleness=staleness,
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_stays_that_of_the_members_walks_whoever_is_there(seed: int):
    """One value instead of a model; each walk anew every round, the mean sent with an error."""
    draw = random.Random(seed)
    members, exact, sent = Members(), 0.0, 0.0
    own: dict[str, float] = {}
    for number in range(12):
        there = sorted(draw.sample("abcd", draw.randint(1, 4)))
        shares = [draw.uniform(0.5, 2.0) for _ in there]
        late = {name: draw.random() < 0.2 for name in there}
        updates, steps = [], []
        for name in there:
            rates, walk = draw.uniform(0.1, 0.3), draw.uniform(-1, 1)
            corrected = name in members.rounds
            steps.append(rates * (walk + (sent - own[name] if corrected else 0.0)))
            updates.append(update(name, rates=rates, corrected=corrected, staleness=int(late[name])))
            if not late[name]:
                own[name] = walk
        plan = plan_walk(updates, shares, members, number=number)
        if plan is None:
            assert all(late.values()) and not members.rounds
            continue
        assert plan.makes_mean
        mean = plan.kept * exact - plan.sent * sent
        mean += sum(factor * step for factor, step in zip(plan.coefficients, steps, strict=True))
        weights = plan.members.weights
        assert mean == pytest.approx(sum(weights[name] * own[name] for name in weights) / sum(weights.values()))
        assert all(plan.members.rounds[name] == number for name in there if not late[name])
        assert all(weights[name] == members.weights[name] for name in members.weights)
        members, exact, sent = plan.members, mean, mean + draw.uniform(-0.1, 0.1)


def test_whose_walk_is_lost_ends_the_mean_and_the_next_round_begins_another():
    members = Members(rounds={"a": 3, "b": 3}, weights={"a": 0.5, "b": 0.5})
    plan = plan_walk([update("a", corrected=True), update("b")], [0.5, 0.5], members, number=4)
    assert plan is not None and not plan.makes_mean and plan.reason.startswith("b was not corrected")
    stranger = plan_walk([update("a", corrected=True)], [1.0], Members(), number=4)
    assert stranger is not None and not stranger.makes_mean and stranger.reason.startswith("a was corrected")
    anew = plan_walk([update("a"), update("b")], [0.25, 0.75], Members(), number=5)
    assert anew is not None and anew.members.rounds == {"a": 5, "b": 5} and (anew.kept, anew.sent) == (0.0, 0.0)


def test_whoever_leaves_the_federation_ends_the_mean():
    """Its walk would stay in the mean, and nobody is corrected by it: the corrections of the others cancel no more."""
    members = Members(rounds={"a": 3, "b": 3, "c": 2}, weights={"a": 0.4, "b": 0.4, "c": 0.2})
    there = [update("a", corrected=True), update("b", corrected=True)]
    absent = plan_walk(there, [0.5, 0.5], members, number=4, facilities=["a", "b", "c"])
    assert absent is not None and absent.members.weights == members.weights
    left = plan_walk(there, [0.5, 0.5], members, number=4, facilities=["a", "b"])
    assert left is not None and not left.makes_mean and left.reason.startswith("c left the federation: the mean walk")


def test_a_round_of_late_updates_alone_keeps_the_mean():
    """It was lost with the first such round: where rounds wait for one update, there was never a correction."""
    members = Members(rounds={"a": 3, "b": 3}, weights={"a": 0.4, "b": 0.6})
    late = [update("b", corrected=True, staleness=1)]
    plan = plan_walk(late, [1.0], members, number=4, facilities=["a", "b"])
    assert plan is not None and (plan.kept, plan.sent, plan.coefficients) == (1.0, 0.0, [0.0])
    assert plan.members == members and plan.makes_mean
    left = plan_walk(late, [1.0], members, number=4, facilities=["b"])
    assert left is not None and not left.makes_mean and left.reason.startswith("a left the federation: the mean walk")
    assert plan_walk(late, [1.0], Members(), number=4) is None


def test_updates_without_a_share_begin_no_mean():
    plan = plan_walk([update("a"), update("b")], [0.0, 0.0], Members(), number=0)
    assert plan is not None and not plan.makes_mean and plan.reason == "no update counts"


def test_rates_far_below_the_others_are_not_counted():
    updates = [update("a"), update("b"), update("c", rates=1e-6)]
    plan = plan_walk(updates, [1 / 3] * 3, Members(), number=0)
    assert plan is not None and plan.members.rounds == {"a": 0, "b": 0} and plan.coefficients[2] == 0


def test_a_walk_far_longer_than_the_others_does_not_steer_them():
    """Its step may be of usual length: few learning rates, within what is counted, make a long walk of it."""
    updates = [update("a"), update("b"), update("c", rates=0.006)]
    plan = plan_walk(updates, [1 / 3] * 3, Members(), number=0, norms=[1.0, 1.2, 1.1])
    assert plan is not None and plan.members.rounds == {"a": 0, "b": 0} and plan.coefficients[2] == 0
    usual = plan_walk([update("a"), update("b"), update("c", rates=0.05)], [1 / 3] * 3, Members(), number=0)
    assert usual is not None and usual.members.rounds == {"a": 0, "b": 0, "c": 0}
    assert plan_walk(updates, [1 / 3] * 3, Members(), number=0, norms=[0.0] * 3) is not None


def test_without_reports_of_walks_there_is_no_plan():
    silent = [Update(facility="a", directory=Path("/"), checkpoint=NOWHERE, report=None, staleness=0)]
    assert plan_walk(silent, [1.0], Members(), number=0) is None


@pytest.mark.parametrize("told", ["[1]", "{", '{"a": "x"}', '{"a": null}'])
def test_weights_that_are_none_are_refused(told: str):
    with pytest.raises(CheckpointError, match="number by facility"):
        weights_in({"weights": told})
