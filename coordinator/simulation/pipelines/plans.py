"""From a problem and a plan to a layout, and its simulation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from coordinator.problem.problem import Problem
from coordinator.simulation.pipelines.graph import Transport
from coordinator.simulation.pipelines.iteration import simulate_layout
from coordinator.simulation.pipelines.layout import Layout, Uplink
from coordinator.simulation.pipelines.result import SimulationResult
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.emulation import Emulation
from facility.exchange.messages.plan import Plan
from facility.exchange.scheduling.policies import POLICIES

BUCKET_BYTES = 25 * 2**20
"""Gradients are exchanged in buckets of about this size (PyTorch DDP's default; Li et al. 2020, arXiv 2006.15704)."""


def layout_of(
    problem: Problem, plan: Plan, *, transport: Transport | None = None, overlap: bool | None = None
) -> Layout:
    """The arrays of `plan` on the devices of `problem`. Raises `ConfigurationError` when they do not fit together.

    `transport` and `overlap`: None for what the problem's `runtime` says.
    """
    _check_fit(problem, plan)
    runtime = problem.runtime
    overlap = runtime.overlap if overlap is None else overlap
    samples, spans = plan.micro_batch_samples, [slice(first, end) for first, end in plan.stage_units]
    forward, backward, update = _compute_seconds(problem, plan, spans)
    activations = problem.per_unit("activation_bytes")
    gradients = _summed(problem, "parameter_bytes", spans)
    gathered = len(spans) > 1 and plan.replicas > 1 and plan.sync.name == "allreduce"
    return Layout(
        grid=plan.grid,
        virtual_stages=plan.virtual_stages,
        schedule=plan.schedule,
        micro_batches=plan.replica_micro_batches,
        micro_batch_samples=samples,
        forward_seconds=forward,
        backward_seconds=backward,
        optimizer_seconds=update,
        cut_bytes=np.array([samples * activations[span.stop - 1] for span in spans[:-1]]),
        gradient_bytes=gradients,
        buckets=_buckets(spans, gradients, overlap),
        in_flight_bytes=samples * _summed(problem, "stored_bytes", spans),
        static_bytes=_summed(problem, "state_bytes", spans) + gathered * _summed(problem, "gathered_bytes", spans),
        latency=problem.latency,
        bandwidth=problem.bandwidth,
        uplinks=_uplinks(problem),
        compression=_compression(problem, plan),
        sync=plan.sync.name,
        sync_every=int(plan.sync.options.get("every", problem.local_steps)),
        transport=transport or runtime.transport,
        overlap=overlap,
        agreement_seconds=runtime.agreement_seconds,
        step_seconds=runtime.step_seconds,
    )


def _check_fit(problem: Problem, plan: Plan) -> None:
    """Raises `ConfigurationError` when the plan is of another problem."""
    used = [device for row in plan.grid for device in row]
    if unknown := [device for device in used if device >= len(problem.devices)]:
        raise ConfigurationError(
            f"the plan uses device {unknown[0]}, but the problem has {len(problem.devices)} "
            f"(0..{len(problem.devices) - 1})"
        )
    if plan.units != len(problem.units):
        raise ConfigurationError(f"the plan covers {plan.units} units, but the problem has {len(problem.units)}")
    for number, name in enumerate(plan.device_ids):
        if number < len(problem.devices) and problem.devices[number].id != name:
            raise ConfigurationError(
                f"the plan calls device {number} {name!r}, the problem {problem.devices[number].id!r}; plan again"
            )


def _compute_seconds(problem: Problem, plan: Plan, spans: list[slice]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[chunk, replica] seconds of a forward, a backward and the optimizer's step."""
    samples = plan.micro_batch_samples
    rows = [list(plan.grid[number % plan.stages]) for number in range(len(plan.stage_units))]

    def held(seconds: np.ndarray) -> np.ndarray:
        return np.array([seconds[row, span].sum(axis=1) for row, span in zip(rows, spans, strict=True)])

    replicated = plan.replicas > 1 and plan.sync.name == "allreduce"
    extra = np.array([problem.runtime.pass_of(span.stop - span.start, replicated=replicated) for span in spans])
    return (
        held(problem.forward_seconds(samples)) + extra[:, :1],
        held(problem.backward_seconds(samples)) + extra[:, 1:],
        held(problem.factors * problem.per_unit("update_seconds")),
    )


def _summed(problem: Problem, name: str, spans: list[slice]) -> np.ndarray:
    """A quantity of the units, summed over each chunk."""
    values = problem.per_unit(name)
    return np.array([values[span].sum() for span in spans])


def _buckets(spans: list[slice], gradients: np.ndarray, overlap: bool) -> tuple[int, ...]:
    """Gradient buckets per chunk: one for each unit, or fewer where the transfers overlap with the backward."""
    return tuple(
        min(span.stop - span.start, max(1, math.ceil(size / BUCKET_BYTES))) if overlap else span.stop - span.start
        for span, size in zip(spans, gradients, strict=True)
    )


def _uplinks(problem: Problem) -> tuple[Uplink, ...]:
    """Links that several pairs of devices share."""
    return tuple(
        Uplink(
            name=link.name,
            bytes_per_second=link.bandwidth_bytes_per_second,
            pairs=frozenset((a, b) for a in link.sources for b in link.destinations if a != b),
        )
        for link in problem.links.shared
    )


def _compression(problem: Problem, plan: Plan) -> dict[tuple[int, int], tuple[float, float]]:
    """(source, destination) -> (ratio, seconds per byte) of the plan's compressed links."""
    codecs = {codec.name: codec.seconds_per_byte for codec in problem.codecs}
    return {(c.source, c.destination): (c.ratio, codecs.get(c.codec, 0.0)) for c in plan.compressed_links}


def simulate(
    problem: Problem,
    plan: Plan,
    *,
    iterations: int = 1,
    emulation: Emulation | None = None,
    transport: Transport | None = None,
    overlap: bool | None = None,
    timeline: bool = False,
    continued: bool = False,
) -> SimulationResult:
    """Simulate `iterations` iterations of `plan` on the devices of `problem`.

    `emulation` adds its stalls before every forward and backward (worker = replica) and multiplies the seconds of
    device d by its factor d. Without one, all iterations are alike. Links without sharing are computed by a longest
    path (milliseconds), shared ones by events. `continued`: batches of thousands of micro-batches from shorter ones
    (`coordinator.simulation.pipelines.steady`).
    """
    layout = layout_of(problem, plan, transport=transport, overlap=overlap)
    if not POLICIES.get(layout.sync).synchronous:
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

    return simulate_layout(layout, iterations=iterations, stall=stall, timeline=timeline, continued=continued)
