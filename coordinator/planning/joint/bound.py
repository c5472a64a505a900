"""Lower bounds on the seconds of any plan, whatever its grid, split, schedule or shares.

For every allowed number of stages S and replicas R whose memory can hold R models, with B micro-batches, W the seconds
of one micro-batch on the fastest device for each unit, V the speeds of the S x R fastest devices together (a device of
speed v needs at least 1/v of the fastest's seconds for any unit), G the bytes of gradients:

- pouring:     B W / V      all devices busy all the time
- passing:     W            a micro-batch passes all units, one after the other
- agreeing:    (B - R) W / V + c G / (sum over stages of 1 / beta)
               a stage's gradients are complete only with its last backward, and each of its devices then sends at least
               c = 2 (R - 1) / R of its bytes (1 where a central server is allowed); beta of the k-th best stage is at
               least the (k R)-th smallest of all devices' cheapest routes to others, as stages are disjoint sets of R
               devices. From (m_r - 1) L_s <= (T - c beta_s L_s G / W) v_rs for a stage with L_s of the work, summed
               over replicas, then stages.
               With interleaving, one chunk may synchronise while another computes: the second term alone.
- streaming:   B / (sum over replicas of 1 / w)
               a replica sends each micro-batch over S - 1 links, one after the other on each; the k-th best replica's
               worst link is at least the k (S - 1)-th edge of the minimum spanning tree (disjoint paths are a forest)

The bound of a shape is the largest of its four; the overall bound is the least over the shapes. All hold on shared
links too, which only add time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coordinator.planning.placement.cost import spanning_tree
from coordinator.problem.objective import weights
from coordinator.problem.problem import Problem
from facility.exchange.schedules.registry import is_interleaved

_NAMES = ("pouring", "passing", "agreeing", "streaming")


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The bound, and where it comes from."""

    seconds: float
    value: float
    """Of the objective: seconds, or seconds times prices."""
    reason: str


class _Facts:
    """Sorted quantities of a problem for one micro-batch size."""

    def __init__(self, problem: Problem, samples: int) -> None:
        self.problem, self.micro_batches = problem, problem.batch_samples // samples
        seconds = problem.forward_seconds(samples) + problem.backward_seconds(samples)
        self.cheapest = seconds.min(axis=0)
        self.work = float(self.cheapest.sum())
        timed = self.cheapest > 0
        ratio = np.where(timed, self.cheapest, 1.0) / np.where(timed, np.maximum(seconds, 1e-300), 1.0)
        self.speeds = np.sort(np.where(timed, ratio, 0.0).max(axis=1) if timed.any() else np.ones(len(seconds)))[::-1]
        self.memory = np.sort(problem.memory)[::-1]
        self.state = float(problem.per_unit("state_bytes").sum())
        gradients = problem.per_unit("parameter_bytes")
        least = float((gradients[timed] / self.cheapest[timed]).min()) if timed.any() else 0.0
        self.gradient = least * self.work
        """Bytes that surely go with the work: every unit has at least this share."""
        self.per_byte = 1 / problem.bandwidth + np.diag(np.full(len(problem.devices), np.inf))
        cuts = problem.per_unit("activation_bytes")[:-1]
        self.activation = samples * float(cuts.min()) if len(cuts) else 0.0
        both = np.maximum(self.per_byte, self.per_byte.T)
        np.fill_diagonal(both, 0.0)
        self.edges = np.array(spanning_tree(both)) * self.activation
        self.nearest = np.sort(self.per_byte, axis=1)
        self.summed = np.cumsum(self.nearest, axis=1)
        """[device, n] seconds a byte to the n + 1 nearest, one after the other."""

    def fits(self, stages: int, replicas: int) -> bool:
        used = self.memory[: stages * replicas]
        return bool(used[:stages].sum() >= self.state and used.sum() >= replicas * self.state)

    def shape(self, stages: int, replicas: int) -> tuple[float, float, float, float]:
        """The four bounds of a shape."""
        speed = float(self.speeds[: stages * replicas].sum())
        batches, work = self.micro_batches, self.work
        rest = max(0, batches - replicas) * work / speed
        if any(is_interleaved(schedule) for schedule in self.problem.schedules):
            rest = 0.0
        return batches * work / speed, work, rest + self._agreeing(stages, replicas), self._streaming(stages, replicas)

    def _agreeing(self, stages: int, replicas: int) -> float:
        if replicas < 2 or self.gradient <= 0:
            return 0.0
        # With one peer after the other the mean counts, else the best of them.
        alone = set(self.problem.syncs) == {"sharded_ps"}
        each = self.summed[:, replicas - 2] / (replicas - 1) if alone else self.nearest[:, 0]
        beta = np.sort(each)[replicas * np.arange(1, stages + 1) - 1]
        share = 1.0 if "central_ps" in self.problem.syncs else 2 * (replicas - 1) / replicas
        return share * self.gradient / float((1.0 / beta).sum()) / self.problem.local_steps

    def _streaming(self, stages: int, replicas: int) -> float:
        if stages < 2 or self.activation <= 0:
            return 0.0
        worst = self.edges[(stages - 1) * np.arange(1, replicas + 1) - 1]
        return self.micro_batches / float((1.0 / worst).sum())


def joint_bound(problem: Problem) -> Bound:
    """No plan that the problem allows is better."""
    devices, units = len(problem.devices), len(problem.units)
    prices = np.sort(weights(problem))
    best: Bound | None = None
    least = np.inf
    for samples in problem.whole_sizes:
        facts = _Facts(problem, samples)
        for stages in problem.stages or range(1, min(devices, units) + 1):
            for replicas in problem.replicas or range(1, devices // stages + 1):
                if stages * replicas > devices or stages > units or replicas > facts.micro_batches:
                    continue
                if not facts.fits(stages, replicas):
                    continue
                found = facts.shape(stages, replicas)
                seconds = max(found) + problem.runtime.step_seconds
                value = seconds * (float(prices[: stages * replicas].sum()) if prices.any() else 1.0)
                least = min(least, seconds)
                if best is None or value < best.value:
                    name = _NAMES[int(np.argmax(found))]
                    best = Bound(seconds=0.0, value=value, reason=f"{name}, with {stages} x {replicas} devices")
    if best is None:
        return Bound(seconds=0.0, value=0.0, reason="no allowed shape fits")
    return Bound(seconds=float(least), value=best.value, reason=best.reason)
