"""Three more rules for which members exchange when, with the events and groups of `GroupScheduler`.

- `GossipScheduler`: asynchronous decentralised parallel SGD (Lian et al., "Asynchronous Decentralized Parallel
  Stochastic Gradient Descent", ICML 2018): a member that is ready exchanges with a random peer that does not wait.
- `PairScheduler`: the blocking variant that SDPipe's artefact measures as its baseline: in iteration k all members
  are shuffled by k and neighbours in that order wait for each other.
- `WaveScheduler`: wave-synchronous parallel (Park et al., "HetPipe", USENIX ATC 2020): a member may be at most
  `staleness` waves ahead of the slowest.
"""

from __future__ import annotations

from collections.abc import Iterable

from facility.exchange.scheduling.draws import uniform_draw
from facility.exchange.scheduling.groups import Group, GroupRules, GroupScheduler, Member
from facility.exchange.scheduling.policies import SchedulerInputs


class GossipScheduler(GroupScheduler):
    """A group of one at once, with a partner drawn from the members present."""

    def __init__(self, members: Iterable[Member] = (), rules: GroupRules | None = None, *, seed: int = 0) -> None:
        super().__init__(members, rules)
        self.seed = seed

    def _next(self, now: float) -> Group | None:
        pending = [m for m in self._pending if not self._members[m].finished]
        if not pending:
            return None if self.active else self._final(now)
        member = pending[0]
        # A peer that has finished keeps serving: what it holds goes into the final average.
        peers = [m for m in self.members if m != member and not self._members[m].returning]
        draw = uniform_draw(self.seed, "gossip", str(member), self._members[member].rounds)
        partner = peers[int(draw * len(peers))] if peers else None
        self._members[member].returning &= partner is None
        return self._group([member], now, "gossip does not wait", connected=False, partner=partner)


class _CatchesUp(GroupScheduler):
    """A member that comes back joins at the iteration that the foremost active member is in."""

    def join(self, member: Member, now: float, *, returning: bool = True, rounds: int = 0) -> list[Group]:
        if returning:
            rounds = max([rounds, *(self._members[m].rounds for m in self.active)])
        return super().join(member, now, returning=returning, rounds=rounds)


class PairScheduler(_CatchesUp):
    """In iteration k, pairs of a common shuffle wait for each other; the odd one out proceeds with its own update."""

    def __init__(self, members: Iterable[Member] = (), rules: GroupRules | None = None, *, seed: int = 0) -> None:
        super().__init__(members, rules)
        self.seed = seed

    def pairing(self, iteration: int) -> list[list[Member]]:
        """The pairs of an iteration, among the active members."""
        order = sorted(self.active, key=lambda m: uniform_draw(self.seed, "pair", iteration, str(m)))
        return [order[i : i + 2] for i in range(0, len(order), 2)]

    def _next(self, now: float) -> Group | None:
        if not self.active:
            return self._final(now)
        for member in self._pending:
            state = self._members[member]
            if state.finished:
                continue
            (pair,) = (p for p in self.pairing(state.rounds) if member in p)
            if any(self._members[m].rounds < state.rounds for m in pair):
                continue  # the partner is still to come to this iteration
            # A partner that is past this iteration (it was paired before somebody left) is not waited for.
            together = [m for m in pair if m in self._pending and self._members[m].rounds == state.rounds]
            for m in together:
                self._members[m].returning &= len(together) == 1
            return self._group(together, now, "the pair is here", connected=False)
        return None


class WaveScheduler(_CatchesUp):
    """Lets a member proceed once none is more than `staleness` waves behind it."""

    def __init__(self, members: Iterable[Member] = (), rules: GroupRules | None = None, *, staleness: int = 1) -> None:
        super().__init__(members, rules)
        self.staleness = staleness

    def _next(self, now: float) -> Group | None:
        if not self.active:
            return self._final(now)
        slowest = min(self._members[m].rounds for m in self.active)
        for member in self._pending:
            state = self._members[member]
            if not state.finished and state.rounds - slowest <= self.staleness:
                state.returning = False
                return self._group([member], now, f"at most {self.staleness} waves ahead", connected=False)
        return None


def gossip(inputs: SchedulerInputs) -> GroupScheduler:
    """The scheduler of `adpsgd`."""
    return GossipScheduler(inputs.members, GroupRules(debias=False, budget=inputs.budget), seed=inputs.seed)


def pairs(inputs: SchedulerInputs) -> GroupScheduler:
    """The scheduler of `adpsgd_blocking`."""
    return PairScheduler(inputs.members, GroupRules(debias=False), seed=inputs.seed)


def waves(inputs: SchedulerInputs) -> GroupScheduler:
    """The scheduler of `wave`; it counts waves where settings count steps."""
    rules = GroupRules(debias=False, budget=-(-inputs.budget // inputs.every))
    return WaveScheduler(inputs.members, rules, staleness=inputs.staleness)
