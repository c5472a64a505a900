"""What is decided for the best grid alone: interleaving (several chunks a device)."""

from __future__ import annotations

import numpy as np

from coordinator.planning.emit import plan_on
from coordinator.planning.joint.incumbent import Best
from coordinator.planning.stop import Stop
from coordinator.problem.problem import Problem
from facility.exchange.schedules.registry import is_interleaved


def interleave(problem: Problem, best: Best, stop: Stop) -> None:
    """Try several chunks per device on the best grid, where allowed; cuts give equal shares of each device's work."""
    base = best.plan
    assert base is not None
    names = [s for s in problem.schedules if is_interleaved(s)]
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
                    schedule=schedule,
                    sync=base.sync.name,
                    virtual_stages=virtual,
                )
                best.offer(plan, f"{base.stages} x {base.replicas}, {virtual} chunks a device, {schedule}")


def _countable(counts: tuple[int, ...], stages: int) -> list[tuple[int, ...]]:
    """Interleaving needs equal rounds of at least `stages` micro-batches: keep the counts only where they divide so."""
    return [counts] if all(count % max(1, count // stages) == 0 for count in counts) else []
