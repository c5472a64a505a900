"""Round-robin pairing of ranks: all pairs are measured, and none disturbs another.

Ranks of one group (a host, a site) share its way out, so in one step each group takes part in one meeting only. Groups
meet in the rounds of the circle method (Kirkman 1847): 8 hosts of 8 ranks need 28 + 7 x 64 steps instead of 2,016.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations

Pair = tuple[int, int]
ALONE = 8
"""In groups up to this size pairs of one group are measured one at a time; in larger ones side by side."""


def rounds(count: int) -> list[list[Pair]]:
    """Every pair of 0..count-1 exactly once; no number twice in a round."""
    players: list[int | None] = [*range(count)]
    if count % 2:
        players.append(None)
    half, result = len(players) // 2, []
    for _ in range(max(0, len(players) - 1)):
        meetings = zip(players[:half], reversed(players[half:]), strict=True)
        result.append([(min(a, b), max(a, b)) for a, b in meetings if a is not None and b is not None])
        players.insert(1, players.pop())
    return [r for r in result if r]


def groups_of(labels: Sequence[Hashable]) -> list[list[int]]:
    """Ranks by label, in order of first appearance."""
    found: dict[Hashable, list[int]] = {}
    for rank, label in enumerate(labels):
        found.setdefault(label, []).append(rank)
    return list(found.values())


def pairing_steps(groups: Sequence[Sequence[int]]) -> list[list[Pair]]:
    """Steps of meetings: every pair of ranks once; in a step no two meetings share a group (but in large groups)."""
    result: list[list[Pair]] = []
    inside = [_inside(group) for group in groups]
    for number in range(max((len(s) for s in inside), default=0)):
        result.append([pair for lane in inside if number < len(lane) for pair in lane[number]])
    for meetings in rounds(len(groups)):
        lanes = [[(a, b) for a in groups[x] for b in groups[y]] for x, y in meetings]
        for number in range(max(len(lane) for lane in lanes)):
            result.append([lane[number] for lane in lanes if number < len(lane)])
    return result


def _inside(group: Sequence[int]) -> list[list[Pair]]:
    if len(group) <= ALONE:
        return [[pair] for pair in combinations(group, 2)]
    return [[(group[a], group[b]) for a, b in meetings] for meetings in rounds(len(group))]


def flow_steps(groups: Sequence[Sequence[int]]) -> list[list[list[Pair]]]:
    """Steps that load the ways out: in each, groups send to other groups with as many flows as they have ranks.

    A step is a list of crowds, a crowd a list of (sender, receiver) that send at the same time. Crowds of one step
    share no group.
    """
    result: list[list[list[Pair]]] = []
    for meetings in rounds(len(groups)):
        for forwards in (True, False):
            step = []
            for x, y in meetings:
                source, target = (groups[x], groups[y]) if forwards else (groups[y], groups[x])
                flows = list(zip(source, target, strict=False))
                if len(flows) > 1:
                    step.append(flows)
            if step:
                result.append(step)
    return result
