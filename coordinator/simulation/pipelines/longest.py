"""Times of a graph whose messages share no link: a longest path, for many replicas and iterations at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.simulation.pipelines.graph import Compute, Template

Times = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of a template's nodes. Trailing axes (replica, iteration, ...) are free, and alike in all arrays."""

    compute: Times
    """[kind, chunk, ...]: forward, backward, backward for the input, backward for the weights."""
    occupied: Times
    """[0 forwards | 1 backwards, cut, ...]: seconds a message keeps its link busy (bytes / bandwidth)."""
    latency: Times
    """[0 forwards | 1 backwards, cut, ...]: seconds from the last byte leaving to its arrival."""
    stalls: Times | None = None
    """[node, ...]: seconds lost before a node starts."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """When every node of a template started and ended, seconds; axes [node, ...]."""

    start: Times
    end: Times


def times(graph: Template, costs: Costs) -> Timed:
    """When every node starts and ends, if no two messages share a link but those between the same two ranks."""
    shape = costs.compute.shape[2:]
    if costs.stalls is not None:
        shape = np.broadcast_shapes(shape, costs.stalls.shape[1:])
    if costs.stalls is None and int(np.prod(shape, initial=1)) <= 2:
        return _scalars(graph, costs, shape)
    moments: list[Times] = []
    starts = np.empty((len(graph.nodes), *shape))
    ends = np.empty_like(starts)
    for number, (node, waits) in enumerate(zip(graph.nodes, graph.waits, strict=True)):
        if waits:
            start = moments[waits[0]]
            for wait in waits[1:]:
                start = np.maximum(start, moments[wait])
        else:
            start = np.zeros(shape)
        if isinstance(node, Compute):
            end = start + costs.compute[node.kind, node.chunk]
            if costs.stalls is not None:
                end = end + costs.stalls[number]
            moments += (end, end)
        else:
            direction = 0 if node.forward else 1
            end = start + costs.occupied[direction, node.cut]
            moments += (end, end + costs.latency[direction, node.cut])
        starts[number], ends[number] = start, end
    return Timed(start=starts, end=ends)


def _scalars(graph: Template, costs: Costs, shape: tuple[int, ...]) -> Timed:
    """Longest path for one or two columns of costs, where plain numbers are faster than arrays."""
    columns = int(np.prod(shape, initial=1))
    starts = np.empty((len(graph.nodes), columns))
    ends = np.empty_like(starts)
    for column in range(columns):
        compute = costs.compute.reshape(*costs.compute.shape[:2], columns)[:, :, column].tolist()
        occupied = costs.occupied.reshape(*costs.occupied.shape[:2], columns)[:, :, column].tolist()
        latency = costs.latency.reshape(*costs.latency.shape[:2], columns)[:, :, column].tolist()
        moments: list[float] = []
        first: list[float] = []
        for node, waits in zip(graph.nodes, graph.waits, strict=True):
            start = max([moments[w] for w in waits]) if waits else 0.0
            first.append(start)
            if isinstance(node, Compute):
                end = start + compute[node.kind][node.chunk]
                moments += (end, end)
            else:
                direction = 0 if node.forward else 1
                end = start + occupied[direction][node.cut]
                moments += (end, end + latency[direction][node.cut])
        starts[:, column] = first
        ends[:, column] = moments[::2]
    return Timed(start=starts.reshape(-1, *shape), end=ends.reshape(-1, *shape))
