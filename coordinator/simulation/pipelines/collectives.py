"""Data-parallel modes as traffic: which bytes go from where to where, and in what order.

`allreduce`: a ring in column order, 2(R - 1) steps of 1/R of the bytes (Patarasuk and Yuan 2009). `sharded_ps`: every
device serves one part; it sends and receives that part to and from all peers, one after the other (the cost of
Yuan et al. 2022, arXiv 2206.01288, eq. 2). `central_ps`: all to the first replica, then back, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.simulation.pipelines.layout import Layout


@dataclass(frozen=True, slots=True)
class Leg:
    """Bytes from one device to another."""

    source: int
    target: int
    bytes: float
    steps: int = 1
    """Messages that the bytes are divided into, each paying the latency."""


Phase = tuple[tuple[Leg, ...], ...]
"""Chains that run side by side; the legs of a chain follow one another."""


def phases(mode: str, devices: Sequence[int], size: float) -> tuple[Phase, ...]:
    """Traffic that synchronises `size` bytes among `devices`: phases one after the other."""
    members = len(devices)
    if members < 2 or size <= 0:
        return ()
    if mode == "sharded_ps":
        part = size / members
        return (tuple(tuple(Leg(d, peer, 2 * part, 2) for peer in devices if peer != d) for d in devices),)
    if mode == "central_ps":
        root, rest = devices[0], devices[1:]
        return (
            (tuple(Leg(peer, root, size) for peer in rest),),
            (tuple(Leg(root, peer, size) for peer in rest),),
        )
    share = 2 * (members - 1) * size / members
    ring = zip(devices, [*devices[1:], devices[0]], strict=True)
    return (tuple((Leg(a, b, share, 2 * (members - 1)),) for a, b in ring),)


def leg_seconds(layout: Layout, leg: Leg) -> float:
    """Seconds of a leg that shares no link."""
    if not layout.bandwidth[leg.source, leg.target] > 0:
        return float("inf")
    sent = layout.sent_bytes(leg.source, leg.target, leg.bytes)
    return layout.delay(leg.source, leg.target, leg.bytes, leg.steps) + sent / layout.bandwidth[leg.source, leg.target]


def seconds(layout: Layout, mode: str, devices: Sequence[int], size: float) -> float:
    """Seconds of the whole exchange when it shares no link."""
    return sum(
        max(sum(leg_seconds(layout, leg) for leg in chain) for chain in phase) for phase in phases(mode, devices, size)
    )
