"""Equal numbers of units for every device, in their own order: the control that every plan is held against."""

from __future__ import annotations

from coordinator.planning.chain import Assignment, Chain, Infeasible
from coordinator.problem.chain import ChainProblem
from facility.exchange.sizes import format_bytes


def even_spans(units: int, devices: int) -> list[tuple[int, int, int]]:
    """Spans whose lengths differ by one at most, longer ones first; devices beyond the units stay empty."""
    short, extra = divmod(units, devices)
    spans, position = [], 0
    for device in range(devices):
        length = short + (device < extra)
        if length:
            spans.append((device, position, position + length))
        position += length
    return spans


def plan_even(problem: ChainProblem) -> Assignment:
    """The even split; raises `Infeasible` where a device has not the memory for its share."""
    chain = Chain(problem)
    spans = even_spans(chain.units, chain.devices)
    over = [(chain.bytes_of(first, end) - chain.limit[device], device) for device, first, end in spans]
    worst, device = max(over)
    if worst > 1e-9 * chain.bytes[-1]:
        raise Infeasible(
            f"the even split exceeds the memory of {sum(o > 0 for o, _ in over)} devices, most on device "
            f"{problem.id_of(device)}: short by {format_bytes(worst)}; use --method exact"
        )
    value = chain.value(spans)
    return Assignment(
        spans=tuple(spans),
        bottleneck=value,
        lower_bound=min(value, chain.fluid_bound),
        proven=False,
        reasons=("equal numbers of units; speed and network are not looked at",),
    )
