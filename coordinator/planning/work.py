"""Steps per facility and round, computed from a federation's past rounds, so that all facilities finish together.

    crossfed plan workflow/federation.yml

For every round the archive records each facility's steps, their time, and the time of everything else in its job
(starting, loading, evaluating, saving). Queue waits are not recorded; pass them with `--queue NAME=SECONDS`, an upper
quantile where they vary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from coordinator.archive.rounds import Archive
from coordinator.config.federation import Federation
from coordinator.planning.budget import Budget, FacilityPace, hold, plan_budget, plan_within
from coordinator.planning.pace import pace_of, sound_rows
from facility.exchange.errors import ConfigurationError


def paces_of(federation: Federation, queues: Mapping[str, float]) -> list[FacilityPace]:
    """How fast every facility was. Raises `ConfigurationError` where the archive holds no sound round of one."""
    federation.check_named("--queue", queues)
    rows = [row for closed in Archive(federation.archive_path).history() for row in closed.facilities]
    found = []
    for name in federation.names:
        if not (latest := sound_rows(rows, name)):
            raise ConfigurationError(
                f"the archive {federation.archive_path} holds no sound round of facility {name!r}, "
                "expected one at least: "
                "run a round first",
                file=federation.file,
            )
        found.append(pace_of(name, latest, queue_seconds=queues.get(name, 0.0)))
    return found


def bounds_of(federation: Federation) -> dict[str, tuple[int, int]]:
    """Fewest and most steps of each facility in a round; empty where steps are not evened out."""
    even = federation.even
    return {one.name: even.bounds(one.training.steps) for one in federation.facilities} if even is not None else {}


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
    bounds, wanted = bounds_of(federation), now if samples is None else samples
    fresh = plan_within(paces, bounds, wanted) if bounds else plan_budget(paces, wanted)
    chosen = fresh if samples is not None else hold(fresh, paces, steps, gain, now)
    if federation.even is not None:
        each = ", ".join(f"{name} {least:,} to {most:,}" for name, (least, most) in bounds.items())
        asked = f"rounds.steps is {federation.even.steps}: rounds ask for such steps by themselves, within {each}"
        return replace(chosen, reasons=(*chosen.reasons, asked))
    changed = [f"{name}: {count or 'leave it out'}" for name, count in chosen.steps.items() if count != steps[name]]
    advice = (f"in federation.yml, set training.steps of {', '.join(changed)}",) if changed else ()
    return replace(chosen, reasons=(*chosen.reasons, *advice))
