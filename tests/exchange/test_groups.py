"""Laws of the group scheduler, checked over random workers that compute, stall, die and come back."""

from __future__ import annotations

import heapq
import json
import math
import random
from collections import defaultdict
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from facility.exchange.errors import ConfigurationError
from facility.exchange.scheduling.groups import Group, GroupRules, GroupScheduler
from tests.examples import examples

RULES = st.builds(
    GroupRules,
    bound=st.sampled_from([0, 1, 2, 3, 5, 10]),
    minimum=st.integers(1, 3),
    maximum=st.sampled_from([0, 3, 4]),
    patience=st.sampled_from([0.0, 0.1, 0.5]),
    window_seconds=st.sampled_from([0.0, 0.001, 0.005]),
    debias=st.booleans(),
    relay=st.sampled_from([0.0, 0.1]),
)


@dataclass
class Run:
    """What happened when workers of given speeds ran under a scheduler for some updates each."""

    groups: list[Group]
    ready_at_close: list[set[int]]
    scheduler: GroupScheduler
    relays: dict[int, list[set[int]]] = field(default_factory=lambda: defaultdict(list))
    """Pairs that averaged while one of them computed, by the number of groups that were closed before."""


def drive(workers: int, rules: GroupRules, *, updates: int, seed: int, slow: float = 1.0, deaths: int = 0) -> Run:
    """An event loop around the scheduler: worker 0 is `slow` times slower, `deaths` workers die and come back."""
    draws = random.Random(seed)
    scheduler = GroupScheduler(range(workers), rules)
    order = 0
    queue: list[tuple[float, int, str, int]] = []
    announced: set[int] = set()
    run = Run([], [], scheduler)

    def push(at: float, kind: str, worker: int) -> None:
        nonlocal order
        order += 1
        heapq.heappush(queue, (at, order, kind, worker))

    def compute(worker: int, now: float) -> None:
        if updates and scheduler.updates >= updates:
            push(now, "finish", worker)
        else:
            push(now + draws.uniform(0.05, 0.15) * (slow if worker == 0 else 1), "ready", worker)

    for worker in range(workers):
        compute(worker, 0.0)
    for number in range(deaths):
        victim = draws.randrange(workers)
        push(draws.uniform(0.1, 1.0) + number, "die", victim)
    while queue:
        now, _, kind, worker = heapq.heappop(queue)
        present = worker in scheduler.members
        if kind == "tick":
            closed = scheduler.tick(now) if scheduler.wake is not None and scheduler.wake <= now else []
        elif kind == "die":
            if not present or len(scheduler.members) == 1:
                continue
            announced.discard(worker)
            queue = [item for item in queue if item[3] != worker or item[2] == "tick"]
            heapq.heapify(queue)
            closed = scheduler.leave(worker, now)
            push(now + 0.3, "return", worker)
        elif kind == "return":
            closed = scheduler.join(worker, now)
            compute(worker, now)
        elif kind == "finish":
            announced.add(worker)
            closed = scheduler.finish(worker, now)
        else:
            announced.add(worker)
            closed = scheduler.ready(worker, now)
        alone: list[Group] = []
        while closed or alone:
            for group in closed:
                run.groups.append(group)
                run.ready_at_close.append(set(announced))
                announced -= set(group.members)
                if not group.final:
                    for member in group.members:
                        compute(member, now)
                if group.pairs and draws.random() < 0.8:
                    alone.append(group)
            closed = []
            if alone:
                group = alone.pop(0)
                run.relays[len(run.groups)].append({*group.members, group.partner})
                closed = scheduler.relayed(group.members[0], group.partner, now)
        if scheduler.wake is not None:
            push(max(now, scheduler.wake), "tick", -1)
    return run


def connected(groups: list[set[int]], everybody: set[int]) -> bool:
    reached = {min(everybody)}
    while True:
        grown = reached.union(*(g for g in groups if g & reached)) if groups else reached
        if grown == reached:
            return reached >= everybody
        reached = grown


@given(workers=st.integers(1, 24), rules=RULES, seed=st.integers(0, 999), slow=st.sampled_from([1.0, 5.0, 40.0]))
@settings(max_examples=examples(120), deadline=None)
def test_no_group_without_the_agreement_of_its_members_and_nobody_waits_for_ever(workers, rules, seed, slow):
    run = drive(workers, rules, updates=workers * 12, seed=seed, slow=slow)
    for group, ready in zip(run.groups, run.ready_at_close, strict=True):
        assert set(group.members) <= ready
        assert sum(group.weights) == pytest.approx(1) and min(group.weights) >= 0
    assert run.groups[-1].final and run.groups[-1].members == tuple(range(workers))
    assert not run.scheduler.waiting
    assert sum(len(g) for g in run.groups if not g.final) == run.scheduler.updates


@given(
    workers=st.integers(2, 24),
    rules=RULES.filter(lambda r: r.bound > 0),
    seed=st.integers(0, 999),
    slow=st.sampled_from([1.0, 5.0, 40.0]),
)
@settings(max_examples=examples(120), deadline=None)
def test_the_union_of_groups_is_connected_at_least_every_P_rounds(workers, rules, seed, slow):
    run = drive(workers, rules, updates=workers * 30, seed=seed, slow=slow)
    everybody, period, spent = set(range(workers)), [], 0
    finishing = False
    served = 0
    for number, group in enumerate(run.groups, 1):
        finishing |= group.final
        period.append(set(group.members))
        spent += len(group)
        served += len(group)
        if finishing or spent > workers * 28:
            break  # towards the end members stop coming, and the union spans only those that still do
        assert group.connected == connected(period, everybody)
        period += run.relays.get(number, [])
        if connected(period, everybody):
            period, served = [], 0
        assert served <= rules.bound * workers


@given(workers=st.integers(1, 12), rules=RULES, seed=st.integers(0, 999))
@settings(max_examples=examples(60), deadline=None)
def test_deaths_and_returns_stop_nobody(workers, rules, seed):
    run = drive(workers, rules, updates=workers * 40, seed=seed, deaths=3)
    assert run.groups[-1].final and run.groups[-1].members == run.scheduler.members
    assert run.scheduler.updates >= workers * 40


def test_same_seed_and_order_of_events_same_groups():
    rules = GroupRules(bound=3)
    assert drive(8, rules, updates=200, seed=4).groups == drive(8, rules, updates=200, seed=4).groups
    assert drive(8, rules, updates=200, seed=4).groups != drive(8, rules, updates=200, seed=5).groups


def test_a_bound_of_one_is_all_reduce():
    for group in drive(8, GroupRules(bound=1, debias=False), updates=80, seed=1).groups:
        assert group.members == tuple(range(8)) and group.weights == (0.125,) * 8


def test_a_straggler_is_waited_for_only_when_the_bound_asks():
    free = drive(8, GroupRules(bound=0), updates=400, seed=2, slow=1000.0)
    assert all(0 not in g.members for g in free.groups[:100])
    bound = drive(8, GroupRules(bound=3), updates=400, seed=2, slow=1000.0)
    first = next(g for g in bound.groups if 0 in g.members)
    assert first.connected and first.waits[1] > 10 > first.waits[0]


def test_debiasing_gives_each_member_the_same_step_scale():
    """By hand: rounds 6 and 2, mean 4: raw weights 4/6 and 4/2, so 1/4 and 3/4."""
    scheduler = GroupScheduler(rules=GroupRules(bound=0))
    scheduler.join("a", 0, rounds=5, returning=False)
    scheduler.join("b", 0, rounds=1, returning=False)
    now = 7.0
    assert scheduler.ready("a", now) == []
    (group,) = scheduler.ready("b", now)
    assert group.members == ("a", "b") and group.rounds == (6, 2) and group.staleness == (0, 4)
    assert group.weights == pytest.approx((0.25, 0.75))
    assert group.step_scale == pytest.approx((4 / 6 + 4 / 2) / 2)


@pytest.mark.parametrize("patience", [0.0, 0.1])
def test_in_common_steps_all_members_move_the_mean_of_replicas_alike(patience: float):
    """However many updates each makes: gradients by weight, steps by step scale, parameters averaged alike."""

    def moved(debias: bool) -> list[float]:
        rules = GroupRules(bound=10, minimum=1, patience=patience, debias=debias)
        total = [0.0] * 4
        for group in drive(4, rules, updates=2000, seed=6, slow=3.0).groups:
            for member, weight in zip(group.members, group.weights, strict=True):
                total[member] += 0.0 if group.final else group.step_scale * weight * len(group) / 4
        return [value / sum(total) * 4 for value in total]

    assert max(abs(share - 1) for share in moved(True)) < 0.03
    assert moved(False)[0] < 0.6


def test_a_member_that_comes_back_receives_before_it_contributes():
    scheduler = GroupScheduler("abc", GroupRules(bound=1))
    scheduler.leave("c", 0)
    scheduler.ready("a", 1)
    (pair,) = scheduler.ready("b", 1)
    assert pair.members == ("a", "b")
    scheduler.join("c", 2)
    scheduler.ready("a", 3), scheduler.ready("b", 3)
    (group,) = scheduler.ready("c", 3)
    assert group.members == ("a", "b", "c") and group.weights[2] == 0
    scheduler.ready("a", 4), scheduler.ready("b", 4)
    (group,) = scheduler.ready("c", 4)
    assert group.weights[2] > 0


def test_two_that_came_back_wait_for_one_that_is_up_to_date():
    scheduler = GroupScheduler("abc", GroupRules(bound=0, window_seconds=0))
    for member in "bc":
        scheduler.leave(member, 0)
    for member in "bc":
        scheduler.join(member, 1)
    assert scheduler.ready("b", 2) == [] and scheduler.ready("c", 2) == [] and scheduler.tick(3) == []
    (group,) = scheduler.ready("a", 4)
    assert group.members == ("a", "b", "c") and group.weights == (1.0, 0.0, 0.0)


def test_a_failed_final_average_is_called_anew_without_the_dead():
    scheduler = GroupScheduler("abc")
    for member in "ab":
        assert scheduler.finish(member, 1) == []
    (final,) = scheduler.finish("c", 2)
    assert final.final and final.members == ("a", "b", "c")
    assert scheduler.leave("c", 3) == [] and scheduler.failed(3) == []
    assert scheduler.finish("b", 4) == []
    (again,) = scheduler.finish("a", 4)
    assert again.final and again.members == ("a", "b")


def test_without_permission_nobody_is_held_back_and_the_bound_is_made_up_for_later():
    rules = GroupRules(bound=2, minimum=1, window_seconds=0.0, window_minimum_seconds=0.0, window_maximum_seconds=0.0)
    scheduler = GroupScheduler(range(3), rules)
    allowed, asked = [False], []

    def may_hold(wanted: bool) -> bool:
        asked.append(wanted)
        return wanted and allowed[0]

    scheduler.may_hold = may_hold
    for step in range(8):
        (group,) = scheduler.ready(0, float(step))
        assert group.members == (0,)
    assert group.reason == "another stage is being connected" and True in asked
    allowed[0] = True
    assert scheduler.ready(0, 8.0) == [] and scheduler.ready(1, 9.0) == []
    (group,) = scheduler.ready(2, 10.0)
    assert group.members == (0, 1, 2) and group.connected and asked[-1] is False


def test_a_phase_that_goes_on_counts_what_was_made_before_its_pause():
    scheduler = GroupScheduler(rules=GroupRules(bound=0, minimum=1, window_seconds=0.0, budget=10))
    for member, rounds in enumerate((2, 3, 4)):
        scheduler.join(member, 0.0, returning=False, rounds=rounds)
    assert scheduler.updates == 9 and not scheduler.stop
    scheduler.ready(0, 1.0)
    assert scheduler.stop and scheduler.rounds(0) == 3


def test_the_state_survives_being_written_down():
    scheduler = GroupScheduler(["it", "cs", "de"], GroupRules(bound=3, window_seconds=0.005))
    scheduler.ready("it", 1.0)
    copy = GroupScheduler.restore(json.loads(json.dumps(scheduler.snapshot())))
    assert copy.ready("cs", 1.001) == scheduler.ready("cs", 1.001)
    assert copy.tick(2.0) == scheduler.tick(2.0) and copy.snapshot() == scheduler.snapshot()
    with pytest.raises(ConfigurationError, match="not a scheduler's state"):
        GroupScheduler.restore({"format": 1, "rules": {"bund": 3}})


@pytest.mark.parametrize(
    "wrong", [{"bound": -1}, {"minimum": 0}, {"maximum": 1}, {"debias_limit": 0.5}, {"window_maximum_seconds": 0.0}]
)
def test_rules_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        GroupRules(**wrong)


def under_way(members: str, rules: GroupRules) -> GroupScheduler:
    """Members that have made a step before, so that nobody waits for the first of all."""
    scheduler = GroupScheduler(rules=rules)
    for member in members:
        scheduler.join(member, 0.0, returning=False, rounds=1)
    return scheduler


def group_of(scheduler: GroupScheduler, member: str, at: float) -> Group:
    """The group that it goes in when nobody else comes."""
    (group,) = scheduler.ready(member, at) or scheduler.tick(scheduler.wake)
    return group


def alone(scheduler: GroupScheduler, arrivals: list[tuple[str, float]]) -> None:
    """They come, and nobody waits."""
    rules, scheduler.rules = scheduler.rules, replace(scheduler.rules, patience=0.0)
    for member, at in arrivals:
        assert group_of(scheduler, member, at).members == (member,)
    scheduler.rules = rules


def test_a_first_arrival_waits_for_those_who_usually_come_soon_and_for_nobody_else():
    scheduler = under_way("abc", GroupRules(bound=0, minimum=1, patience=0.003, window_seconds=0.0))
    # No record yet, no window: everybody alone. Then a is due at 3, b at 3.05 and c at 3.5.
    alone(scheduler, [("a", 1.0), ("b", 1.05), ("c", 1.5), ("a", 2.0), ("b", 2.05), ("c", 2.5)])
    assert not scheduler.ready("a", 3.0)
    # By then b, due at 3.05, would be late indeed.
    assert scheduler.wake == pytest.approx(3 + 0.003 / (0.1 / 7 + 0.1 / 6))
    (group,) = scheduler.ready("b", 3.06)
    assert group.members == ("a", "b") and group.waits == (pytest.approx(0.06), 0)


def test_all_who_make_their_first_step_wait_for_one_another_a_part_of_its_length():
    scheduler = GroupScheduler("abc", GroupRules(bound=0, minimum=1, patience=0.01, window_seconds=0.0))
    assert not scheduler.ready("a", 10.0)
    assert not scheduler.ready("b", 11.0)
    (group,) = scheduler.tick(12.0)  # a fifth of ten seconds later
    assert group.members == ("a", "b")
    assert [g.members for g in scheduler.ready("c", 15.0)] == [("c",)]  # nobody else is at its first


RELAY = GroupRules(bound=0, minimum=1, window_seconds=0.0, relay=0.05)


def test_who_comes_alone_is_handed_what_the_last_group_left():
    scheduler = under_way("abcd", RELAY)
    first = group_of(scheduler, "a", 1.0)
    assert (first.partner, first.after) == (None, 0)
    second = group_of(scheduler, "b", 1.1)
    assert (second.partner, second.after) == ("a", first.number)
    third = group_of(scheduler, "c", 1.2)
    assert (third.partner, third.after) == ("b", second.number)
    again = group_of(scheduler, "c", 1.3)
    assert again.partner is None, "it was in the last group itself"
    back = group_of(scheduler, "b", 1.4)
    assert (back.partner, back.after) == ("c", again.number)


def test_what_is_not_over_or_gone_is_not_handed_on():
    scheduler = under_way("abc", RELAY)
    first = group_of(scheduler, "a", 1.0)
    scheduler.ended = lambda number: number != first.number
    assert group_of(scheduler, "b", 1.1).partner is None
    scheduler.leave("b", 1.2)
    assert group_of(scheduler, "c", 1.3).partner is None
    scheduler.failed(1.4)
    scheduler.ended = lambda number: True
    assert group_of(scheduler, "a", 1.5).partner is None


def test_an_average_with_a_partner_connects_and_a_gradient_does_not():
    scheduler = under_way("ab", GroupRules(bound=5, minimum=1, window_seconds=0.0, relay=0.05))
    group_of(scheduler, "a", 1.0)
    group = group_of(scheduler, "b", 1.1)
    assert group.partner == "a" and not group.connected and scheduler._served == 2
    scheduler.relayed("b", "a", 1.2)
    assert scheduler._served == 0


def test_members_of_a_group_whose_keeper_moved_send_everything_again():
    rules = GroupRules(bound=0, minimum=1, window_seconds=0.1, window_maximum_seconds=0.2, relay=0.05)
    scheduler = under_way("abc", rules)
    counts = []
    for now in range(1, 4):
        scheduler.ready("a", now)
        groups = scheduler.ready("b", now) + scheduler.tick(now + 0.5)
        counts.append(groups[0].together)
    assert counts == [1, 2, 3]
    scheduler.ready("c", 4.0)
    assert scheduler.tick(4.5)[0].partner == "a"
    scheduler.ready("a", 5.0)
    assert (scheduler.ready("b", 5.0) + scheduler.tick(5.5))[0].together == 1


def test_handing_on_that_takes_too_much_of_a_step_is_left_for_a_while():
    scheduler = under_way("ab", RELAY)
    named = []
    for step in range(1, 80):
        for member, at in (("a", float(step)), ("b", step + 0.5)):
            group = group_of(scheduler, member, at)
            named.append(group.partner is not None)
            scheduler.exchanged(member, at + (0.1 if group.partner is not None else 0.0))  # a tenth of a step
    assert all(named[1:10]) and not any(named[12:100]) and any(named[100:])


def test_of_whom_nothing_is_known_one_expects_what_is_usual_for_oneself():
    scheduler = under_way("ab", GroupRules(bound=0, minimum=1, patience=0.003, window_seconds=0.0))
    alone(scheduler, [("a", 1.0), ("b", 1.05)])
    assert not scheduler.ready("a", 2.0)
    assert scheduler.ready("b", 2.06)[0].members == ("a", "b")


def test_somebody_late_is_given_up_when_it_should_have_come():
    scheduler = under_way("ab", GroupRules(bound=0, minimum=1, patience=0.003, window_seconds=0.0))
    alone(scheduler, [("a", 1.0), ("b", 1.05), ("a", 2.0), ("b", 2.05)])
    assert not scheduler.ready("a", 3.0)
    (group,) = scheduler.tick(scheduler.wake)
    assert group.members == ("a",) and group.waits == (pytest.approx(0.003 / (0.1 / 7 + 0.1 / 6), abs=1e-4),)
    alone(scheduler, [("b", 3.5)])  # a is due at 4.1, longer than b would wait


def apart(steps: list[float]) -> GroupScheduler:
    """Two make these steps, a from second 0, b from 0.2, until one waits for the other."""
    scheduler = under_way("ab", GroupRules(bound=0, minimum=1, patience=0.005, window_seconds=0.0))
    arrivals, now = [], 0.0
    for step in [1.0, *steps]:
        now += step
        arrivals += [("a", now), ("b", now + 0.2)]
    for member, at in arrivals:
        groups = scheduler.ready(member, at)
        if not groups:
            return scheduler
        assert groups[0].members == (member,)
    return scheduler


def test_the_steadier_they_are_the_longer_they_wait_for_one_another():
    """By hand: after n and n - 1 steps 0.005 / (0.1/(n + 5) + 0.1/(n + 4)) is 0.19 s for n = 3, 0.21 for n = 4."""
    assert not apart([1.0] * 3).waiting
    scheduler = apart([1.0] * 4)
    assert scheduler.waiting == ("a",) and scheduler.ready("b", 5.2)[0].members == ("a", "b")
    assert not apart([1.0, 1.0, 2.0] * 10).waiting, "a third of the steps late: the chance is 1/3, so 0.01 s at most"


@pytest.mark.parametrize(("late", "longest"), [(0.05, 0.05), (0.3, 0.153)])
def test_small_lateness_parts_nobody_who_would_wait_longer(late: float, longest: float):
    """Every fifth step is late. 0.05 s is less than two steady members wait for each other (a quarter of a step);
    0.3 s is more than two wait of whom each is late as often (after 20 steps 0.05 / (4.1/25 + 4.1/25) = 0.152 s), so
    they part."""
    scheduler = under_way("ab", GroupRules(bound=0, minimum=1, patience=0.05, window_seconds=0.0))
    steps = {m: [1.0 + late * (n % 5 == start) for n in range(40)] for start, m in enumerate("ab")}
    formed: list[Group] = []
    left = {m: iter(own) for m, own in steps.items()}
    coming = {m: next(own) for m, own in left.items()}
    while coming:
        member = min(coming, key=lambda m: coming[m])
        at = coming.pop(member)
        groups = scheduler.ready(member, at)
        if not groups and scheduler.wake < min(coming.values(), default=math.inf):
            at = scheduler.wake
            groups = scheduler.tick(at)
        for group in groups:
            formed.append(group)
            for m in group.members:
                if (step := next(left[m], None)) is not None:
                    coming[m] = at + step
    settled = formed[len(formed) // 2 : -1]
    assert all(len(group.members) == 2 for group in settled) == (late == longest)
    assert max(wait for group in settled for wait in group.waits) <= longest + 1e-9


@pytest.mark.parametrize("told", [True, False])
def test_a_long_exchange_makes_nobody_late_when_its_end_is_told(told: bool):
    scheduler = under_way("ab", GroupRules(bound=0, minimum=1, patience=0.05, window_seconds=0.0))
    alone(scheduler, [(m, float(at) + (m == "b") / 1000) for at in range(1, 3) for m in "ab"])
    scheduler.ready("a", 3.0)
    (group,) = scheduler.ready("b", 3.001)
    for member in group.members:
        if told:
            scheduler.exchanged(member, 3.5)
    groups = scheduler.ready("a", 4.5)
    assert [g.members for g in groups] == ([] if told else [("a",)])


def test_members_that_stay_together_are_counted():
    scheduler = GroupScheduler("abc", GroupRules(bound=0, minimum=3))
    counts, now = [], 0.0
    for _ in range(3):
        now += 1
        groups = [group for member in "abc" for group in scheduler.ready(member, now)]
        counts.append(groups[0].together)
    assert counts == [1, 2, 3]
    scheduler.failed(now)
    groups = [group for member in "abc" for group in scheduler.ready(member, now + 1)]
    assert groups[0].together == 1
    scheduler.ended = lambda number: False  # not everybody has told of its end: not sure
    groups = [group for member in "abc" for group in scheduler.ready(member, now + 2)]
    assert groups[0].together == 1
