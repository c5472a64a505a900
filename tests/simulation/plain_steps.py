"""Durations of steps for simulated replicas that are no pipelines."""

from __future__ import annotations

from coordinator.simulation.replicas import Step
from facility.exchange.messages.emulation import Emulation


def plain_steps(emulation: Emulation, forward_seconds: float, backward_seconds: float) -> Step:
    """Steps of replicas that are one process each: a forward and a backward, stalled and slowed by `emulation`."""

    def step(replica: int, number: int, now: float) -> float:
        forward = emulation.duration(replica, forward_seconds, 2 * number, at_seconds=now)
        return forward + emulation.duration(replica, backward_seconds, 2 * number + 1, at_seconds=now + forward)

    return step
