"""Data-parallel modes as traffic: which bytes go from where to where, and in what order.

`allreduce`: a ring in column order, 2(R - 1) steps of 1/R of the bytes (Patarasuk and Yuan 2009). `sharded_ps`: every
device serves one part; it sends and receives that part to and from all peers, one after the other (the cost of
Yuan et al. 2022, arXiv 2206.01288, eq. 2). `central_ps`: all to the first replica, then back, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Flows:
    """All legs of one phase, as arrays: a million of them among a thousand devices that all serve a part."""

    sources: NDArray[np.int64]
    """[chain, leg]"""
    targets: NDArray[np.int64]
    """[chain, leg]"""
    bytes: float
    """Bytes of each leg."""
    steps: int = 1

    def sent(self, layout: Layout) -> NDArray[np.float64]:
        """[chain, leg] bytes that travel."""
        return self._compression(layout)[0] * self.bytes

    def seconds(self, layout: Layout) -> NDArray[np.float64]:
        """[chain, leg] seconds where no link is shared; infinite where there is none."""
        ratio, coding = self._compression(layout)
        speed = layout.bandwidth[self.sources, self.targets]
        with np.errstate(divide="ignore"):
            occupied = np.where(speed > 0, ratio * self.bytes / speed, np.inf)
        return self.steps * layout.latency[self.sources, self.targets] + coding * self.bytes + occupied

    def _compression(self, layout: Layout) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[chain, leg] of what compresses its link: bytes after over bytes before, and seconds per byte before."""
        ratio, coding = np.ones(self.sources.shape), np.zeros(self.sources.shape)
        for (source, target), (smaller, slower) in layout.compression.items():
            link = (self.sources == source) & (self.targets == target)
            ratio[link], coding[link] = smaller, slower
        return ratio, coding


def flows(mode: str, devices: Sequence[int], size: float) -> tuple[Flows, ...]:
    """Traffic that synchronises `size` bytes among `devices`: phases one after the other."""
    members = len(devices)
    if members < 2 or size <= 0:
        return ()
    group = np.array(devices, dtype=np.int64)
    if mode == "sharded_ps":
        others = ~np.eye(members, dtype=bool)
        shape = (members, members - 1)
        sources = np.broadcast_to(group[:, None], (members, members))[others].reshape(shape)
        targets = np.broadcast_to(group[None, :], (members, members))[others].reshape(shape)
        return (Flows(sources=sources, targets=targets, bytes=2 * size / members, steps=2),)
    if mode == "central_ps":
        root, rest = np.broadcast_to(group[:1], (1, members - 1)), group[None, 1:]
        return Flows(sources=rest, targets=root, bytes=size), Flows(sources=root, targets=rest, bytes=size)
    steps = 2 * (members - 1)
    following = np.roll(group, -1)
    return (Flows(sources=group[:, None], targets=following[:, None], bytes=steps * size / members, steps=steps),)


def phases(mode: str, devices: Sequence[int], size: float) -> tuple[Phase, ...]:
    """The phases of a collective, leg by leg."""
    return tuple(
        tuple(
            tuple(Leg(a, b, one.bytes, one.steps) for a, b in zip(chain, ends, strict=True))
            for chain, ends in zip(one.sources.tolist(), one.targets.tolist(), strict=True)
        )
        for one in flows(mode, devices, size)
    )


def pairs(mode: str, devices: Sequence[int]) -> set[tuple[int, int]]:
    """The (source, target) pairs between which something travels."""
    found: set[tuple[int, int]] = set()
    for one in flows(mode, devices, 1.0):
        found.update(zip(one.sources.ravel().tolist(), one.targets.ravel().tolist(), strict=True))
    return found


def seconds(layout: Layout, mode: str, devices: Sequence[int], size: float) -> float:
    """Seconds of the whole exchange when it shares no link."""
    return sum(float(one.seconds(layout).sum(axis=1).max()) for one in flows(mode, devices, size))


def sent_bytes(layout: Layout, mode: str, devices: Sequence[int], size: float) -> float:
    """Bytes of the whole exchange."""
    return sum(float(one.sent(layout).sum()) for one in flows(mode, devices, size))
