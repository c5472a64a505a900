"""Steps per facility and round, computed from a federation's past rounds, so that all facilities finish together.

    crossfed plan workflow/federation.yml

For every round the archive records each facility's steps, their time, and the time of everything else (loading,
evaluating, saving). Queue waits are not recorded; pass them with `--queue NAME=SECONDS`, an upper quantile where they
vary.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace

from coordinator.archive.rounds import Archive, FacilityRow
from coordinator.config.federation import Federation
from coordinator.planning.budget import Budget, FacilityPace, hold, plan_budget
from facility.exchange.errors import ConfigurationError

ROUNDS = 5
"""Latest sound rounds of a facility whose median counts."""


def paces_of(federation: Federation, queues: Mapping[str, float]) -> list[FacilityPace]:
    """How fast every facility was. Raises `ConfigurationError` where the archive holds no sound round of one."""
    if federation.groups is not None:
        raise ConfigurationError(
            "groups: nobody waits for the slowest, so there is no round to even out", file=federation.file
        )
    names = [facility.name for facility in federation.facilities]
    if unknown := sorted(set(queues) - set(names)):
        raise ConfigurationError(f"--queue names {unknown[0]!r}; the facilities are {', '.join(names)}")
    rows: dict[str, list[FacilityRow]] = {name: [] for name in names}
    for closed in Archive(federation.archive_path).history():
        for row in closed.facilities:
            if row.facility in rows and row.status == "ok" and row.steps > 0 and row.tokens_per_second > 0:
                rows[row.facility].append(row)
    found = []
    for name in names:
        if not (latest := rows[name][-ROUNDS:]):
            raise ConfigurationError(
                f"the archive {federation.archive_path} holds no sound round of facility {name!r}, "
                "expected one at least: "
                "run a round first",
                file=federation.file,
            )
        train = [row.tokens / row.tokens_per_second for row in latest]
        found.append(
            FacilityPace(
                name=name,
                seconds_per_step=statistics.median(t / row.steps for t, row in zip(train, latest, strict=True)),
                samples_per_step=statistics.median(row.samples / row.steps for row in latest),
                queue_seconds=queues.get(name, 0.0),
                fixed_seconds=statistics.median(max(0.0, r.seconds - t) for t, r in zip(train, latest, strict=True)),
            )
        )
    return found


def plan_work(
    federation: Federation,
    *,
    queues: Mapping[str, float] | None = None,
    samples: float | None = None,
    gain: float = 0.05,
) -> Budget:
    """Steps of every facility; what is set now stays unless the round gets shorter by a share of `gain`.

    `samples`: of a round over all facilities; None: as many as the settings ask for now.
    """
    paces = paces_of(federation, queues or {})
    steps = {facility.name: facility.training.steps for facility in federation.facilities}
    now = sum(steps[pace.name] * pace.samples_per_step for pace in paces)
    fresh = plan_budget(paces, now if samples is None else samples)
    chosen = fresh if samples is not None else hold(fresh, paces, steps, gain)
    changed = [f"{name}: {count or 'leave it out'}" for name, count in chosen.steps.items() if count != steps[name]]
    advice = (f"in federation.yml, set training.steps of {', '.join(changed)}",) if changed else ()
    return replace(chosen, reasons=(*chosen.reasons, *advice))
