"""From a problem and a plan to a layout, and its simulation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from coordinator.problem.problem import Problem
from coordinator.simulation.pipelines.graph import Transport
from coordinator.simulation.pipelines.iteration import SYNCHRONOUS, simulate_layout
from coordinator.simulation.pipelines.layout import Layout, Uplink
from coordinator.simulation.pipelines.result import SimulationResult
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.emulation import Emulation
from facility.exchange.messages.plan import Plan

BUCKET_BYTES = 25 * 2**20
"""Gradients are exchanged in buckets of about this size (PyTorch DDP's default; Li et al. 2020, arXiv 2006.15704)."""


def layout_of(
    problem: Problem, plan: Plan, *, transport: Transport | None = None, overlap: bool | None = None
) -> Layout:
    """The arrays of `plan` on the devices of `problem`. Raises `ConfigurationError` when they do not fit together.

    `transport` and `overlap`: None for what the problem's `runtime` says.
    """
    runtime = problem.runtime
    overlap = runtime.overlap if overlap is None else overlap
    used = [device for row in plan.grid for device in row]
    if unknown := [device for device in used if device >= len(problem.devices)]:
        raise ConfigurationError(
            f"the plan uses device {unknown[0]}, but the problem has {len(problem.devices)} (0..{len(problem.devices) - 1})"
        )
    if plan.units != len(problem.units):
        raise ConfigurationError(f"the plan covers {plan.units} units, but the problem has {len(problem.units)}")
    for number, name in enumerate(plan.device_ids):
        if number < len(problem.devices) and problem.devices[number].id != name:
            raise ConfigurationError(
                f"the plan calls device {number} {name!r}, the problem {problem.devices[number].id!r}; plan again"
            )
    samples = plan.micro_batch_samples
    forward, backward = problem.forward_seconds(samples), problem.backward_seconds(samples)
    rows = [list(plan.grid[number % plan.stages]) for number in range(len(plan.stage_units))]
    spans = [slice(first, end) for first, end in plan.stage_units]

    replicated = plan.replicas > 1 and plan.sync.name == "allreduce"
    extra = np.array([runtime.pass_of(span.stop - span.start, replicated=replicated) for span in spans])
    update = problem.factors * problem.per_unit("update_seconds")

    def summed(name: str) -> np.ndarray:
        values = problem.per_unit(name)
        return np.array([values[span].sum() for span in spans])

    activations = problem.per_unit("activation_bytes")
    gradients = summed("parameter_bytes")
    codecs = {codec.name: codec.seconds_per_byte for codec in problem.codecs}
    return Layout(
        grid=plan.grid,
        virtual_stages=plan.virtual_stages,
        schedule=plan.schedule,
        micro_batches=plan.replica_micro_batches,
        micro_batch_samples=samples,
        forward_seconds=np.array([forward[row, span].sum(axis=1) for row, span in zip(rows, spans, strict=True)])
        + extra[:, :1],
        backward_seconds=np.array([backward[row, span].sum(axis=1) for row, span in zip(rows, spans, strict=True)])
        + extra[:, 1:],
        optimizer_seconds=np.array([update[row, span].sum(axis=1) for row, span in zip(rows, spans, strict=True)]),
        cut_bytes=np.array([samples * activations[span.stop - 1] for span in spans[:-1]]),
        gradient_bytes=gradients,
        buckets=tuple(
            min(span.stop - span.start, max(1, math.ceil(size / BUCKET_BYTES))) if overlap else span.stop - span.start
            for span, size in zip(spans, gradients, strict=True)
        ),
        in_flight_bytes=samples * summed("stored_bytes"),
        static_bytes=summed("state_bytes"),
        latency=problem.latency,
        bandwidth=problem.bandwidth,
        uplinks=tuple(
            Uplink(
                name=link.name,
                bytes_per_second=link.bandwidth_bytes_per_second,
                pairs=frozenset((a, b) for a in link.sources for b in link.destinations if a != b),
            )
            for link in problem.links.shared
        ),
        compression={(c.source, c.destination): (c.ratio, codecs.get(c.codec, 0.0)) for c in plan.compressed_links},
        sync=plan.sync.name,
        sync_every=int(plan.sync.options.get("every", problem.local_steps)),
        transport=transport or runtime.transport,
        overlap=overlap,
        agreement_seconds=runtime.agreement_seconds,
        step_seconds=runtime.step_seconds,
    )


def simulate(
    problem: Problem,
    plan: Plan,
    *,
    iterations: int = 1,
    emulation: Emulation | None = None,
    transport: Transport | None = None,
    overlap: bool | None = None,
    timeline: bool = False,
) -> SimulationResult:
    """Simulate `iterations` iterations of `plan` on the devices of `problem`.

    `emulation` adds its stalls before every forward and backward (worker = replica) and multiplies the seconds of
    device d by its factor d. Without one, all iterations are alike. Links that nobody shares are computed by a longest
    path (milliseconds), shared ones by events.
    """
    layout = layout_of(problem, plan, transport=transport, overlap=overlap)
    if layout.sync not in SYNCHRONOUS:
        layout = replace(layout, sync="none")
    stall = None
    if emulation is not None:
        factors = np.array([[emulation.factor(device) for device in row] for row in layout.grid])
        factors = np.tile(factors, (layout.virtual_stages, 1))
        layout = replace(
            layout,
            forward_seconds=layout.forward_seconds * factors,
            backward_seconds=layout.backward_seconds * factors,
        )
        if emulation.probability and emulation.seconds:
            found = emulation

            def stall(replica: int, stage: int, draw: int) -> float:
                return found.stall(replica, draw, stage=stage)

    return simulate_layout(layout, iterations=iterations, stall=stall, timeline=timeline)
