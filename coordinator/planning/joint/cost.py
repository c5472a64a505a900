"""The pipelined cost of many layouts at once: closed forms cheap enough for the search; the simulator decides.

For a replica with micro-batches M, stage seconds f_s forward and b_s backward, and boundary seconds w (bytes /
bandwidth):

    GPipe  sum f + sum (w + latency) + (M - 1) max(f, w), then the same backward      (a permutation flow shop: exact)
    1F1B   round trip of one micro-batch + (M - 1) period,
           period = max(f_s + b_s, w, round trip from s / in flight at s)

Only the slowest link streams; the others add one micro-batch and their latency (unlike arXiv 2206.01288, whose cost
sums whole batches over all boundaries). Replicas synchronise gradients stage by stage while earlier stages still run
backward and during the stage's last backward, bucket by bucket; only the remainder is charged. Links shared by sites
are divided by the flows that cross them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coordinator.problem.objective import weights
from coordinator.problem.problem import Problem
from coordinator.simulation.pipelines.plans import BUCKET_BYTES
from facility.exchange.schedules.registry import SCHEDULES


@dataclass
class Layouts:
    """Many layouts of one shape: [layout, ...]."""

    line: np.ndarray
    """[layout, device]: the grid row by row, then the idle devices."""
    cuts: np.ndarray
    """[layout, stages + 1] first unit of every stage, then the number of units."""
    share: np.ndarray
    """[layout, replica] micro-batches."""

    def copy(self) -> Layouts:
        return Layouts(self.line.copy(), self.cuts.copy(), self.share.copy())

    def take(self, index: np.ndarray | list[int]) -> Layouts:
        return Layouts(self.line[index], self.cuts[index], self.share[index])

    def put(self, where: np.ndarray, other: Layouts) -> None:
        for mine, theirs in (
            (self.line, other.line),
            (self.cuts, other.cuts),
            (self.share, other.share),
        ):
            mine[where] = theirs[where]

    @staticmethod
    def join(parts: list[Layouts]) -> Layouts:
        return Layouts(*(np.concatenate([getattr(p, name) for p in parts]) for name in ("line", "cuts", "share")))


class Cost:
    """Costs of layouts of `stages` x `replicas` of one problem with one micro-batch size and schedule."""

    def __init__(self, problem: Problem, stages: int, replicas: int, samples: int, schedule: str) -> None:
        self.problem, self.stages, self.replicas = problem, stages, replicas
        self.samples, self.schedule = samples, schedule
        self.micro_batches = problem.batch_samples // samples
        self.forward = _prefix(problem.forward_seconds(samples))
        self.backward = _prefix(problem.backward_seconds(samples))
        self.cut_bytes = samples * problem.per_unit("activation_bytes")
        self.gradient = _prefix(problem.per_unit("parameter_bytes"))
        self.stored = samples * _prefix(problem.per_unit("stored_bytes"))
        self.update = _prefix(problem.factors * problem.per_unit("update_seconds"))
        self.runtime = problem.runtime
        self.prices = weights(problem)
        self.hooked = replicas > 1 and "allreduce" in problem.syncs
        """True if the trainer's own all-reduce keeps replicas together; assumed where it may be chosen."""
        gathered = problem.per_unit("gathered_bytes") * (self.hooked and stages > 1)
        self.state = _prefix(problem.per_unit("state_bytes") + gathered)
        self.latency = problem.latency
        self.per_byte = 1.0 / problem.bandwidth
        self.memory = problem.memory
        self.units = len(problem.units)
        count = len(problem.devices)
        self.shared: list[tuple[np.ndarray, float]] = []
        for link in problem.links.shared:
            mask = np.zeros((count, count), dtype=bool)
            mask[np.ix_(link.sources, link.destinations)] = True
            self.shared.append((mask, link.bandwidth_bytes_per_second))

    def in_flight(self, share: np.ndarray) -> np.ndarray:
        """[layout, stage, replica] micro-batches whose activations a device holds at once."""
        if SCHEDULES.get(self.schedule).holds_all:
            return np.broadcast_to(share[:, None, :], (len(share), self.stages, self.replicas))
        depth = np.arange(self.stages, 0, -1)[None, :, None]
        return np.minimum(depth, share[:, None, :])

    def seconds(self, layouts: Layouts, smooth: np.ndarray | float = 0.0) -> np.ndarray:
        """[layout] seconds an iteration, memory excess punished; `smooth` mixes means into the maxima."""
        stages, replicas = self.stages, self.replicas
        k = len(layouts.line)
        grid = layouts.line[:, : stages * replicas].reshape(k, stages, replicas)
        first, end = layouts.cuts[:, :-1, None], layouts.cuts[:, 1:, None]
        share = layouts.share
        eps = np.broadcast_to(np.asarray(smooth, dtype=float), (k,))

        def worst(values: np.ndarray) -> np.ndarray:
            """Largest over the last axis, with a little of the mean."""
            weight = eps.reshape((k,) + (1,) * (values.ndim - 2))
            return (1 - weight) * values.max(axis=-1) + weight * values.mean(axis=-1)

        once_f, once_b = self.runtime.pass_of(1, replicated=self.hooked)
        once = self.runtime.pass_seconds
        f = self.forward[grid, end] - self.forward[grid, first] + once + (once_f - once) * (end - first)
        b = self.backward[grid, end] - self.backward[grid, first] + once + (once_b - once) * (end - first)
        left, right = grid[:, :-1], grid[:, 1:]
        size = self.cut_bytes[layouts.cuts[:, 1:-1] - 1][:, :, None]
        there, back = self._per_byte(left, right)
        wf, wb = size * there, size * back
        tf, tb = wf + self.latency[left, right], wb + self.latency[right, left]
        more = (share - 1).astype(float)
        if SCHEDULES.get(self.schedule).holds_all:
            flow_f = worst(np.concatenate([f, wf], axis=1).transpose(0, 2, 1))
            flow_b = worst(np.concatenate([b, wb], axis=1).transpose(0, 2, 1))
            total = (f + b).sum(axis=1) + (tf + tb).sum(axis=1) + more * (flow_f + flow_b)
        else:
            hop = np.concatenate([tf + tb, np.zeros((k, 1, replicas))], axis=1)
            trip = np.flip(np.cumsum(np.flip(f + b + hop, axis=1), axis=1), axis=1)
            depth = np.minimum(np.arange(stages, 0, -1)[None, :, None], share[:, None, :])
            periods = np.concatenate([f + b, wf, wb, trip / depth], axis=1)
            total = trip[:, 0] + more * worst(periods.transpose(0, 2, 1))
        # The last backward of stage s ends before the whole does by what remains of its way to stage 0.
        after = np.concatenate([np.zeros((k, 1, replicas)), np.cumsum(b[:, :-1] + tb, axis=1)], axis=1)
        done = worst(total[:, None, :] - after)
        exposed = self._agreement(grid, layouts.cuts, b)
        whole = worst(done + exposed / self.problem.local_steps)
        if self.update.any():
            whole = whole + (self.update[grid, end] - self.update[grid, first]).max(axis=(1, 2))
        return (whole + self.runtime.step_seconds) * (1 + 3 * self._excess(grid, layouts))

    def value(self, layouts: Layouts, smooth: np.ndarray | float = 0.0) -> np.ndarray:
        """[layout] the objective: the seconds, times the prices of the devices in use where those count."""
        seconds = self.seconds(layouts, smooth)
        if self.prices.any():
            seconds = seconds * self.prices[layouts.line[:, : self.stages * self.replicas]].sum(axis=1)
        return seconds

    def _per_byte(self, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        there, back = self.per_byte[left, right], self.per_byte[right, left]
        for mask, capacity in self.shared:
            ahead, behind = mask[left, right], mask[right, left]
            flows = (ahead.sum(axis=(1, 2)) + behind.sum(axis=(1, 2)))[:, None, None] / capacity
            there, back = (
                np.where(ahead, np.maximum(there, flows), there),
                np.where(behind, np.maximum(back, flows), back),
            )
        return there, back

    def _agreement(self, grid: np.ndarray, cuts: np.ndarray, b: np.ndarray) -> np.ndarray:
        """[layout, stage] seconds of gradient sync not hidden by the stage's own last backward; best allowed mode."""
        replicas = self.replicas
        if replicas == 1:
            return np.zeros(grid.shape[:2])
        size = self.gradient[cuts[:, 1:]] - self.gradient[cuts[:, :-1]]
        pieces = (cuts[:, 1:] - cuts[:, :-1]).astype(float)
        if self.runtime.overlap:
            pieces = np.minimum(pieces, np.maximum(1, np.ceil(size / BUCKET_BYTES)))
        own = b.max(axis=2)
        best: np.ndarray | None = None
        for mode in self.problem.syncs:
            agreed = self._mode(mode, grid, size, pieces) + pieces * self.runtime.agreement_seconds
            seconds = exposed = np.where(size > 0, agreed, 0.0)
            if self.runtime.overlap:
                exposed = np.maximum(seconds - own * (1 - 1 / pieces), seconds / pieces)
            if best is None:
                best, worst = exposed, exposed.max(axis=1)
            else:
                better = exposed.max(axis=1) < worst
                best = np.where(better[:, None], exposed, best)
                worst = best.max(axis=1)
        assert best is not None
        return best

    def _mode(self, mode: str, grid: np.ndarray, size: np.ndarray, pieces: np.ndarray) -> np.ndarray:
        """[layout, stage] seconds of one agreement, as the simulator's traffic has it."""
        replicas = self.replicas
        if mode == "allreduce":
            ring = np.roll(grid, -1, axis=2)
            slow = self._stage_per_byte(grid, ring)
            steps = 2 * (replicas - 1)
            bytes_each = (steps / replicas * size)[:, :, None]
            return (bytes_each * slow + pieces[:, :, None] * steps * self.latency[grid, ring]).max(axis=2)
        if mode == "sharded_ps":
            part = (2 * size / replicas)[:, :, None]
            slow, wait = self._to_all_others(grid)
            return (part * slow + 2 * pieces[:, :, None] * wait).max(axis=2)
        root, rest = grid[:, :, :1], grid[:, :, 1:]
        inward = (
            size[:, :, None] * self._stage_per_byte(rest, root) + pieces[:, :, None] * self.latency[rest, root]
        ).max(axis=2)
        outward = (
            size[:, :, None] * self._stage_per_byte(root, rest) + pieces[:, :, None] * self.latency[root, rest]
        ).max(axis=2)
        return inward + outward

    def _to_all_others(self, grid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[layout, stage, replica] sums over the other replicas of a stage: seconds a byte to them, and latencies."""
        if not self.shared:  # every pair of a thousand replicas is a million numbers a layout: products add them up
            member = np.zeros((*grid.shape[:2], len(self.memory)))
            np.put_along_axis(member, grid, 1.0, axis=2)
            slow, wait = member @ self.per_byte.T, member @ self.latency.T
            return np.take_along_axis(slow, grid, axis=2), np.take_along_axis(wait, grid, axis=2)
        slow, wait = np.empty(grid.shape), np.empty(grid.shape)
        own = np.eye(self.replicas, dtype=bool)
        for number in range(len(grid)):
            a, c = grid[number : number + 1, :, :, None], grid[number : number + 1, :, None, :]
            slow[number] = np.where(own, 0.0, self._stage_per_byte(a, c)).sum(axis=3)[0]
            wait[number] = self.latency[a, c].sum(axis=3)[0]
        return slow, wait

    def _stage_per_byte(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Seconds a byte, shared links divided by all agreeing flows that cross them."""
        slow = self.per_byte[source, target]
        for mask, capacity in self.shared:
            crossing = mask[source, target]
            axes = tuple(range(1, crossing.ndim))
            flows = crossing.sum(axis=axes).reshape((-1,) + (1,) * (crossing.ndim - 1)) / capacity
            slow = np.where(crossing, np.maximum(slow, flows), slow)
        return slow

    def _excess(self, grid: np.ndarray, layouts: Layouts) -> np.ndarray:
        """[layout] how far memory is exceeded, as a share, summed over devices."""
        cuts = layouts.cuts
        state = (self.state[cuts[:, 1:]] - self.state[cuts[:, :-1]])[:, :, None]
        stored = (self.stored[cuts[:, 1:]] - self.stored[cuts[:, :-1]])[:, :, None]
        need = state + stored * self.in_flight(layouts.share)
        return np.maximum(0.0, need / self.memory[grid] - 1.0).sum(axis=(1, 2))

    def feasible(self, layouts: Layouts) -> np.ndarray:
        """[layout] is every memory kept?"""
        grid = layouts.line[:, : self.stages * self.replicas].reshape(-1, self.stages, self.replicas)
        return self._excess(grid, layouts) <= 1e-9


def _prefix(values: np.ndarray) -> np.ndarray:
    """Sums of the units before each, along the last axis."""
    return np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)
