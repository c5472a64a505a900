"""Decides whether the devices cover a periodic chain within a bottleneck value, in any order: an integer programme.

A transformer's chain is a prefix, one period (attention, feed-forward in, feed-forward out) many times, and a suffix. A
device that begins at phase p of the period takes up to n units in any repetition, so only the phases of its two ends
matter: a plan is a trail from the start S through the phases to the end E, with a device on each arc. Inside the prefix
and the suffix every position is a node of its own. For every start and every phase of the end, the longest span
dominates the shorter ones (they differ by whole periods). Integer variables: the number of devices of each class on
each arc. Constraints: each device once, flow in = flow out at every node between, units covered >= units of the chain.
A solution whose arcs are connected is an Eulerian trail; a disconnected one is cut off and the programme solved again.
Solved with HiGHS through scipy (feasibility proofs of these sizes take 0.02-1 s).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from coordinator.planning.chain import Chain


@dataclass(frozen=True)
class Period:
    """Units [first, end) repeat with `length`."""

    first: int
    end: int
    length: int


START, END = -1, -2
LONGEST_PERIOD = 12
"""Units; a longer repetition is not looked for."""
INFEASIBLE = 2
"""Status of `scipy.optimize.milp`."""
Constraint = tuple[np.ndarray, float, float]
"""Coefficient of each arc, least and largest sum."""


@dataclass(frozen=True)
class Arc:
    """`group` may cover `units` from `tail` to `head`. These are nodes: phases 0..length-1, length + position inside
    the prefix or the suffix, `START` or `END`."""

    group: int
    tail: int
    head: int
    units: int


def find_period(chain: Chain) -> Period | None:
    """The longest periodic part with the shortest period, if it is at least four fifths of the chain."""
    columns = np.concatenate([chain.unit_seconds, np.array(chain.problem.unit_bytes)[None]])
    best: Period | None = None
    for length in range(1, min(LONGEST_PERIOD, chain.units // 3) + 1):
        equal = np.isclose(columns[:, length:], columns[:, :-length], rtol=1e-9, atol=0).all(axis=0)
        start = 0
        for stop in [*np.flatnonzero(~equal).tolist(), len(equal)]:
            if stop - start >= 2 * length:
                found = Period(start, stop + length, length)
                if best is None or found.end - found.first > best.end - best.first + length:
                    best = found
            start = stop + 1
    return best if best and best.end - best.first >= 0.8 * chain.units else None


def _arcs(chain: Chain, period: Period, value: float) -> list[Arc]:
    """All useful arcs: from a fixed position the furthest, from a phase the longest to every other node."""
    first, end, length, units = period.first, period.end, period.length, chain.units

    def node(position: int) -> int:
        if position == units:
            return END
        return (position - first) % length if first <= position <= end else length + position

    arcs: list[Arc] = []
    for group, members in enumerate(chain.classes):
        reach = chain.reach(members[0], value)
        for begin in (0, *range(1, first), *range(end + 1, units)):
            tail, furthest = node(begin) if begin else START, int(reach[begin])
            top = min(furthest, end)
            arcs += [
                Arc(group, tail, node(b), b - begin) for b in range(max(first, begin + 1, top - length + 1), top + 1)
            ]
            if begin < furthest and not first <= furthest <= end:
                arcs.append(Arc(group, tail, node(furthest), furthest - begin))
        for phase in range(length):
            # The longest span from this phase anywhere in the repetition: look at its first occurrence.
            begin = first + phase
            top = min(int(reach[begin]), end) - begin
            arcs += [Arc(group, phase, (phase + n) % length, n) for n in range(max(1, top - length + 1), top + 1)]
        for phase in range(length):
            begins = np.arange(first + phase, end + 1, length)
            for last in (*range(end + 1, units), units):
                good = begins[(begins < last) & (reach[begins] >= last)]
                if len(good):
                    arcs.append(Arc(group, phase, node(last), last - int(good[0])))
    return arcs


def decide_periodic(chain: Chain, period: Period, value: float, deadline: float) -> list[int] | bool | None:
    """An order of devices that covers the chain within `value`; False if proven impossible, None if undecided."""
    arcs = _arcs(chain, period, value)
    if not {START, END} <= {node for arc in arcs for node in (arc.tail, arc.head)}:
        return False  # no device holds the first unit, or the last
    rows = _constraints(chain, arcs)
    most = np.array([float(len(chain.classes[a.group])) for a in arcs])
    most[[a.tail == START or a.head == END for a in arcs]] = 1.0
    for _ in range(20):
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        least, largest = [low for _, low, _ in rows], [high for _, _, high in rows]
        result = milp(
            np.zeros(len(arcs)),
            constraints=LinearConstraint(coo_array(np.array([row for row, _, _ in rows])), least, largest),
            integrality=np.ones(len(arcs)),
            bounds=Bounds(0, most),
            options={"time_limit": left, "presolve": True},
        )
        if result.status == INFEASIBLE:
            return False
        if result.x is None:
            return None
        chosen = {arc: int(n) for arc, n in zip(arcs, np.rint(result.x), strict=True) if n > 0.5}
        trail, island = _trail(chosen)
        if not island:
            return _devices_along(trail, chain.classes)
        rows.append(_without_island(arcs, island, chain.devices))
    return None


def _constraints(chain: Chain, arcs: Sequence[Arc]) -> list[Constraint]:
    """On the number of devices on each arc: what the module's text lists."""
    rows: list[Constraint] = []
    for group, members in enumerate(chain.classes):
        rows.append((np.array([float(a.group == group) for a in arcs]), 0.0, float(len(members))))
    for node in sorted({node for a in arcs for node in (a.tail, a.head)} - {START, END}):
        rows.append((np.array([float(a.head == node) - float(a.tail == node) for a in arcs]), 0.0, 0.0))
    rows.append((np.array([float(a.tail == START) for a in arcs]), 1.0, 1.0))
    rows.append((np.array([float(a.head == END) for a in arcs]), 1.0, 1.0))
    rows.append((np.array([float(a.units) for a in arcs]), float(chain.units), np.inf))
    return rows


def _without_island(arcs: Sequence[Arc], island: set[int], devices: int) -> Constraint:
    """Arcs between nodes of an island may be used only if some arc leads into it."""
    inside = np.array([float(a.tail in island and a.head in island) for a in arcs])
    into = np.array([float(a.tail not in island and a.head in island) for a in arcs])
    return inside - devices * into, -np.inf, 0.0


def _devices_along(trail: Sequence[Arc], classes: Sequence[Sequence[int]]) -> list[int]:
    """A device of the arc's class for each arc, then those that the trail leaves over."""
    stock = [list(members) for members in classes]
    order = [stock[arc.group].pop() for arc in trail]
    return order + [device for members in stock for device in members]


def _trail(chosen: dict[Arc, int]) -> tuple[list[Arc], set[int]]:
    """An Eulerian trail from S to E (Hierholzer), and the phases it cannot reach."""
    leaving: dict[int, list[Arc]] = {}
    for arc, number in chosen.items():
        leaving.setdefault(arc.tail, []).extend([arc] * number)
    stack: list[tuple[int, Arc | None]] = [(START, None)]
    trail: list[Arc] = []
    while stack:
        node, by = stack[-1]
        if leaving.get(node):
            arc = leaving[node].pop()
            stack.append((arc.head, arc))
        else:
            stack.pop()
            if by is not None:
                trail.append(by)
    trail.reverse()
    return trail, {node for node, arcs in leaving.items() if arcs}
