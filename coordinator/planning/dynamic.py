"""Local rebalancing from the even split, devices in their given order.

The idea of Sky Computing's `dynamic` allocator (Zhu et al. 2022, arXiv 2202.11836; `scaelum/dynamics/allocator.py`)
without its defects: both neighbours of a boundary are compared with each other (the original compares a device with
itself, so it never moves units to the right), the first device can lose units too, every step respects memory limits,
and a device may end empty but is never skipped.
"""

from __future__ import annotations

from coordinator.planning.chain import Assignment, Chain, Infeasible
from coordinator.planning.even import even_spans
from coordinator.problem.chain import ChainProblem
from facility.exchange.sizes import format_bytes


def plan_dynamic(problem: ChainProblem, *, sweeps: int = 1000) -> Assignment:
    """Shift boundaries one unit at a time while that helps; raises `Infeasible` if no split in this order fits."""
    chain = Chain(problem)
    cuts = [0] * (chain.devices + 1)
    for device, _, end in even_spans(chain.units, chain.devices):
        cuts[device + 1] = end
    for device in range(chain.devices):
        cuts[device + 1] = max(cuts[device + 1], cuts[device])
    _fit_memory(chain, cuts)
    done, moved = 0, True
    while moved and done < sweeps:
        done += 1
        moved = False
        for boundary in range(1, chain.devices):
            moved |= _shift(chain, cuts, boundary)
    spans = tuple((d, cuts[d], cuts[d + 1]) for d in range(chain.devices) if cuts[d + 1] > cuts[d])
    value = chain.value(spans)
    return Assignment(
        spans=spans,
        bottleneck=value,
        lower_bound=min(value, chain.fluid_bound),
        proven=False,
        reasons=(f"boundaries shifted between neighbours until none helped ({done} sweeps); order of devices kept",),
    )


def _fit_memory(chain: Chain, cuts: list[int]) -> None:
    """Push what is over a memory to the right, then to the left."""
    last = chain.devices
    for device in range(last):
        cuts[device + 1] = max(cuts[device], min(cuts[device + 1], int(chain.memory_reach[device, cuts[device]])))
    cuts[last] = chain.units
    for device in reversed(range(last)):
        while chain.bytes_of(cuts[device], cuts[device + 1]) > chain.limit[device] * (1 + 1e-12):
            if device == 0:
                short = chain.bytes_of(0, cuts[1]) - chain.limit[0]
                raise Infeasible(
                    f"with the devices in this order device {chain.problem.id_of(0)} is short by "
                    f"{format_bytes(short)}; use --method exact, which may order them freely"
                )
            cuts[device] += 1


def _shift(chain: Chain, cuts: list[int], boundary: int) -> bool:
    """Move one boundary by units while the busier of its two devices gets less busy."""
    left, right, moved = boundary - 1, boundary, False
    while True:
        first, cut, end = cuts[boundary - 1], cuts[boundary], cuts[boundary + 1]
        now = max(chain.seconds(left, first, cut), chain.seconds(right, cut, end))
        for step in (-1, 1):
            new = cut + step
            if not first <= new <= end:
                continue
            if max(chain.seconds(left, first, new), chain.seconds(right, new, end)) >= now * (1 - 1e-12):
                continue
            if chain.bytes_of(first, new) > chain.limit[left] or chain.bytes_of(new, end) > chain.limit[right]:
                continue
            cuts[boundary] = new
            moved = True
            break
        else:
            return moved
