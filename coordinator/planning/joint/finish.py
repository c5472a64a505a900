"""What is settled for the best grid alone: interleaving (several chunks a device) and which links compress."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np

from coordinator.planning.emit import plan_on, simulated_seconds
from coordinator.planning.joint.incumbent import Best
from coordinator.planning.stop import Stop
from coordinator.problem.problem import Problem
from facility.exchange.messages.plan import CompressedLink, Schedule


def interleave(problem: Problem, best: Best, stop: Stop) -> None:
    """Try to give every device of the best grid several chunks, where allowed; cuts by equal share of each device's work."""
    base = best.plan
    assert base is not None
    names = [s for s in problem.schedules if s.startswith("interleaved")]
    if not names or base.stages < 2:
        return
    samples = base.micro_batch_samples
    ends = np.array([0.0, *np.cumsum([end - first for first, end in base.stage_units])])
    for virtual in (2, 3, 4):
        chunks = base.stages * virtual
        if chunks > base.units or stop.interrupted:
            break
        sizes = np.diff(ends) / virtual
        cuts = np.rint(np.concatenate([[0.0], np.cumsum(np.tile(sizes, virtual))])).astype(int)
        steps = np.arange(chunks + 1)  # no chunk is empty: each cut beyond the one before, and room for those after
        cuts = np.maximum.accumulate(cuts - steps) + steps
        cuts = np.minimum(cuts, base.units - steps[::-1])
        for schedule in names:
            for counts in _countable(base.replica_micro_batches, base.stages):
                plan = plan_on(
                    problem,
                    base.grid,
                    list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)),
                    micro_batches=counts,
                    micro_batch_samples=samples,
                    schedule=cast(Schedule, schedule),
                    sync=base.sync.name,
                    virtual_stages=virtual,
                )
                best.offer(plan, f"{base.stages} x {base.replicas}, {virtual} chunks a device, {schedule}")


def _countable(counts: tuple[int, ...], stages: int) -> list[tuple[int, ...]]:
    """Interleaving goes in equal rounds of at least `stages` micro-batches: keep the counts only where they divide so."""
    return [counts] if all(count % max(1, count // stages) == 0 for count in counts) else []


def compress(problem: Problem, best: Best) -> None:
    """Compress the slowest boundaries first, one pair of stages after another, as long as that saves at least 1 %."""
    for codec in problem.codecs:
        for _ in range(best.plan.stages if best.plan else 0):
            base = best.plan
            assert base is not None
            options: list[tuple[float, int]] = []
            done = {(link.source, link.destination) for link in base.compressed_links}
            for stage in range(base.stages - 1):
                pairs = list(zip(base.grid[stage], base.grid[stage + 1], strict=True))
                if pairs[0] in done:
                    continue
                options.append((max(1 / problem.bandwidth[a, b] for a, b in pairs), stage))
            if not options:
                break
            stage = max(options)[1]
            pairs = list(zip(base.grid[stage], base.grid[stage + 1], strict=True))
            links = tuple(
                CompressedLink(source=s, destination=d, codec=codec.name, ratio=codec.ratio)
                for a, b in pairs
                for s, d in ((a, b), (b, a))
            )
            trial = replace(base, compressed_links=base.compressed_links + links)
            if simulated_seconds(problem, trial) > 0.99 * best.seconds:
                break
            best.offer(trial, f"{codec.name} on the boundary after stage {stage}")
