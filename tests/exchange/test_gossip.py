"""Laws of gossip, blocking pairs and waves."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from facility.exchange.scheduling.gossip import GossipScheduler, PairScheduler, WaveScheduler
from facility.exchange.scheduling.groups import GroupRules
from tests.examples import examples


def test_gossip_never_waits_and_meets_everybody_alike():
    scheduler = GossipScheduler(range(5), seed=1)
    met: Counter[int] = Counter()
    for turn in range(2000):
        (group,) = scheduler.ready(0, float(turn))
        assert group.members == (0,) and group.partner in (1, 2, 3, 4)
        met[group.partner] += 1
    assert min(met.values()) > 400
    again = GossipScheduler(range(5), seed=1)
    assert [again.ready(0, 0.0)[0].partner for _ in range(50)] == [
        g.partner for g in (GossipScheduler.ready(s, 0, 0.0)[0] for s in [GossipScheduler(range(5), seed=1)] * 50)
    ]


def test_the_last_one_has_no_partner():
    scheduler = GossipScheduler([0, 1])
    scheduler.leave(1, 0.0)
    assert scheduler.ready(0, 1.0)[0].partner is None


@given(members=st.integers(2, 9), order=st.randoms(use_true_random=False))
@settings(max_examples=examples(40), deadline=None)
def test_blocking_pairs_meet_in_the_same_iteration_and_all_get_through(members, order):
    scheduler = PairScheduler(range(members), seed=3)
    iterations, made = 6, Counter()
    idle = list(range(members))
    now = 0.0
    while idle:
        member = order.choice(idle)
        idle.remove(member)
        now += 1
        made[member] += 1
        for group in scheduler.ready(member, now):
            assert len(set(group.rounds)) == 1 and len(group) <= 2
            idle += [m for m in group.members if made[m] < iterations]
    assert set(made.values()) == {iterations} and not scheduler.waiting


@given(members=st.integers(1, 6), staleness=st.integers(0, 3), order=st.randoms(use_true_random=False))
@settings(max_examples=examples(60), deadline=None)
def test_nobody_is_more_than_the_bound_of_waves_ahead(members, staleness, order):
    scheduler = WaveScheduler(range(members), GroupRules(debias=False), staleness=staleness)
    waves, computing, now = 8, set(range(members)), 0.0
    done: Counter[int] = Counter()
    while computing:
        member = order.choice(sorted(computing))
        computing.remove(member)
        now += 1
        done[member] += 1
        released = scheduler.ready(member, now)
        while released:
            (free,) = released.pop().members
            assert done[free] - min(done[m] for m in scheduler.active) <= staleness
            if done[free] < waves:
                computing.add(free)
            else:
                released += [g for g in scheduler.finish(free, now) if not g.final]
    assert all(done[m] == waves for m in range(members))
