"""What `rounds: {steps: elastic}` means for each facility's next rounds: bounds, expected steps, node-hours, weights.

From the settings alone before a round was timed; from the paces of the latest rounds and the waits of the journal
after, with the coordinator's own rule (`coordinator.steps.elastic`). What it brings is simulated beside equal steps
(`coordinator.simulation.facilities`), each job's wait drawn from those that its facility was seen to take.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from coordinator.archive.journal import Entry, Journal
from coordinator.archive.rounds import Archive, FacilityRow, RoundFile
from coordinator.config.federation import Federation
from coordinator.planning.pace import sound_rows
from coordinator.rounds.participation import participation
from coordinator.simulation import described
from coordinator.simulation.facilities import simulate_federation
from coordinator.steps.elastic import Elastic, Ends, common_end, ends_ahead, loads_of

ROUNDS = 400
"""That are simulated."""
LATEST = 5
"""Rounds whose steps `crossfed explain` lists."""
STEADY = 0.05
"""Waits that vary by less, as a share of a round, leave nothing to gain over `steps: auto`."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What is expected of a facility whose rounds were timed."""

    steps: float
    """Mean, over the waits that its latest jobs took."""
    fewest: int
    """With the longest of those waits."""
    most: int
    """Steps after the shortest of those waits."""
    seconds_per_step: float
    own_seconds: float
    """Of a job, beside training and its queue."""
    nodes: int
    tokens_per_step: float

    def job_seconds(self, steps: float) -> float:
        return self.own_seconds + steps * self.seconds_per_step

    def node_hours(self, steps: float) -> float:
        return self.nodes * self.job_seconds(steps) / 3600


@dataclass(frozen=True, kw_only=True)
class Share:
    """One facility."""

    nominal: int
    """`training.steps`."""
    least: int
    most: int
    """Bounds."""
    timed: Timed | None = None


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What is expected of the rounds to come."""

    facilities: Mapping[str, Share]
    end_seconds: float | None = None
    """From a round's model to its end; None: fewer than two facilities were timed."""
    tokens_a_day: float | None = None
    """Tokens a day of all facilities together, simulated."""
    equal_tokens_a_day: float | None = None
    """Tokens a day with `training.steps` at every facility, simulated."""
    remarks: tuple[str, ...] = ()

    def weights(self) -> dict[str, float]:
        """Expected share of each facility in the mean, by tokens and participation; empty unless all were timed."""
        timed = {name: one.timed for name, one in self.facilities.items() if one.timed is not None}
        if len(timed) < len(self.facilities):
            return {}
        work = {name: one.steps / self.facilities[name].nominal for name, one in timed.items()}
        factors = participation(work, work)
        tokens = {name: one.steps * one.tokens_per_step * factors[name] for name, one in timed.items()}
        return {name: one / sum(tokens.values()) for name, one in tokens.items()}

    def table(self) -> str:
        """A table of the outlook for people."""
        width, weights = max(8, *(len(name) for name in self.facilities)), self.weights()
        heads = ("training.steps", "bounds", "expected", "seen waits", "node-hours a round", "weight")
        rows = [heads]
        for name, one in self.facilities.items():
            bounds = f"{one.least:,} to {one.most:,}"
            if (timed := one.timed) is None:
                rows.append((f"{one.nominal:,}", bounds, "not timed", "", "", ""))
                continue
            hours = [timed.node_hours(steps) for steps in (one.least, timed.steps, one.most)]
            cost = f"{hours[1]:.3g} ({hours[0]:.3g} to {hours[2]:.3g})"
            share = f"{weights[name]:.3f}" if weights else ""
            seen = f"{timed.fewest:,} to {timed.most:,}"
            rows.append((f"{one.nominal:,}", bounds, f"{timed.steps:,.1f}", seen, cost, share))
        names = ["facility", *self.facilities]
        wide = [max(len(row[place]) for row in rows) for place in range(len(heads))]
        lines = [
            "  ".join([f"{name:<{width}}", *(f"{cell:>{size}}" for cell, size in zip(row, wide, strict=True))]).rstrip()
            for name, row in zip(names, rows, strict=True)
        ]
        return "\n".join([*lines, *(f"- {remark}" for remark in self.remarks)])

    def to_json(self) -> dict[str, Any]:
        return {"format": 1, "steps": "elastic", **asdict(self), "weights": self.weights()}


def outlook(
    federation: Federation,
    *,
    queues: Mapping[str, float] | None = None,
    history: Sequence[RoundFile] | None = None,
    entries: Sequence[Entry] | None = None,
) -> Outlook:
    """What `steps: elastic` is expected to mean; `history` and `entries` are the archive's unless they are given.

    `queues`: seconds that a facility's jobs are to wait in place of those seen. Raises `ConfigurationError` where it
    names no facility.
    """
    even = federation.even
    assert even is not None
    federation.check_named("--queue", queues or {})
    history = Archive(federation.archive_path).history() if history is None else history
    entries = Journal(federation.archive_path).read() if entries is None else entries
    nominal = {one.name: one.training.steps for one in federation.facilities}
    ends = ends_ahead(even, nominal, history, entries)
    if ends is not None and queues:
        ends = _with_queues(ends, queues, nominal)
    rows = [row for entry in history for row in entry.facilities]
    steps = {} if ends is None else _expected(ends)
    shares = {}
    for name in federation.names:
        least, most = even.bounds(nominal[name])
        timed = _timed(ends.facilities[name], ends.seconds, steps[name], rows, name) if name in steps and ends else None
        shares[name] = Share(nominal=nominal[name], least=least, most=most, timed=timed)
    found = Outlook(facilities=shares)
    if ends is not None:
        elastic, equal = (_simulated(federation, ends, found, how) for how in ("elastic", "fixed"))
        found = replace(found, end_seconds=ends.seconds, tokens_a_day=elastic, equal_tokens_a_day=equal)
    return replace(found, remarks=(*_findings(found), *in_vain(federation, ends)))


def explained(federation: Federation, name: str) -> list[str]:
    """Lines of `crossfed explain FACILITY` on how many steps its jobs take, and why."""
    history = Archive(federation.archive_path).history()
    found = outlook(federation, history=history)
    one = found.facilities[name]
    lines = [
        f"  Its jobs take as many steps as fit until the expected end of their round, {one.least:,} to {one.most:,} "
        f"(training.steps is {one.nominal:,}; rounds.steps is elastic)."
    ]
    taken = [
        (row.round, row.steps)
        for entry in history
        for row in entry.facilities
        if row.facility == name and row.status == "ok" and row.steps
    ]
    if taken:
        latest = ", ".join(f"{steps:,} in round {number}" for number, steps in taken[-LATEST:])
        lines.append(f"  They took {latest}.")
    if one.timed is None:
        lines.append("  The next takes training.steps: too little is known yet of this and another facility's times.")
    else:
        share = found.weights().get(name)
        weight = f", and about {share:.2f} of the weight" if share is not None else ""
        lines.append(
            f"  Expected of the next: about {one.timed.steps:,.0f} steps ({one.timed.fewest:,} to {one.timed.most:,} "
            f"by the waits seen){weight}."
        )
    return lines


def in_vain(federation: Federation, ends: Ends | None = None) -> list[str]:
    """Reasons for which elastic steps change nothing, or not what a reader expects."""
    even, facilities, reasons = federation.even, federation.facilities, []
    assert even is not None
    if len(facilities) < 2:
        reasons.append("there is one facility, which waits for no other: it takes its training.steps")
    steps = [one.training.steps for one in facilities]
    if all(even.bounds(one) == (one, one) for one in steps):
        reasons.append("the bounds leave every facility its training.steps")
    kind = federation.aggregation.weights
    if kind == "equal" or isinstance(kind, dict):
        reasons.append(
            f"aggregation.weights is {'equal' if kind == 'equal' else 'given by facility'}: an update counts the same "
            "whatever its steps"
        )
    if ends is not None and (spread := _varies(ends)) < STEADY:
        reasons.append(
            f"what jobs needed beside training varied by {spread:.1%} of a round: `steps: auto`, which agrees the "
            "steps before the queue, does the same"
        )
    return reasons


def _varies(ends: Ends) -> float:
    """Largest standard deviation of a facility's waits, as a share of the round."""
    return max(float(np.std(one.waits)) for one in ends.facilities.values()) / ends.seconds


def _with_queues(ends: Ends, queues: Mapping[str, float], nominal: Mapping[str, int]) -> Ends:
    """`ends` with the jobs of each named facility waiting so long, beside what is their own."""
    facilities = {
        name: replace(one, waits=[queues[name] + one.own_seconds]) if name in queues else one
        for name, one in ends.facilities.items()
    }
    wanted = sum(nominal[name] * one.pace.samples_per_step for name, one in facilities.items())
    return Ends(seconds=common_end(list(facilities.values()), wanted), facilities=facilities)


def _expected(ends: Ends) -> dict[str, float]:
    steps = loads_of(list(ends.facilities.values())).steps_until(ends.seconds)
    return dict(zip(ends.facilities, map(float, steps), strict=True))


def _timed(one: Elastic, end: float, steps: float, rows: Sequence[FacilityRow], name: str) -> Timed:
    found = sound_rows(rows, name)

    def after(wait: float) -> int:
        room = (end - one.pace.fixed_seconds - wait) / one.pace.seconds_per_step
        return min(max(math.floor(room + 1e-6), one.least), one.most)

    nodes = [row.nodes for row in found if row.usage.get("node_seconds") and row.seconds]
    return Timed(
        steps=steps,
        fewest=after(max(one.waits)),
        most=after(min(one.waits)),
        seconds_per_step=one.pace.seconds_per_step,
        own_seconds=one.own_seconds,
        nodes=max(1, round(statistics.median(nodes))) if nodes else 1,
        tokens_per_step=statistics.median(row.tokens / row.steps for row in found),
    )


def _simulated(federation: Federation, ends: Ends, found: Outlook, steps: str) -> float:
    """Tokens a day of the facilities that were timed."""
    even, closing = federation.even, federation.closing
    assert even is not None
    sites = []
    for name, one in ends.facilities.items():
        share, timed = found.facilities[name], found.facilities[name].timed
        assert timed is not None
        waits = [wait + one.pace.fixed_seconds for wait in one.waits]
        sites.append(
            described.Site(
                name=name,
                train_seconds=share.nominal * one.pace.seconds_per_step,
                samples=share.nominal * timed.tokens_per_step,
                round_steps=share.nominal,
                queue=described.Queue(kind="seen", waits=waits),
            )
        )
    late: dict[str, Any] = {}
    if closing is not None:  # without, a round waits for all
        late = {"policy": "quorum", "quorum": closing.needed(len(sites)), "late": closing.late}
    result = simulate_federation(
        described.Scenario(
            rounds=ROUNDS,
            facilities=sites,
            steps=steps,  # type: ignore[arg-type]
            least_steps=even.least_steps,
            most_steps=even.most_steps,
            **late,
        )
    )
    return 24 * result.samples_per_hour


def _findings(found: Outlook) -> list[str]:
    missing = [name for name, one in found.facilities.items() if one.timed is None]
    if found.end_seconds is None:
        return ["fewer than two facilities were timed in a complete round: the next round takes training.steps"]
    lines = [f"rounds are to end {found.end_seconds:,.0f} s after their model, or as near to it as the bounds allow"]
    if missing:
        lines.append(f"not timed yet, and left at training.steps: {', '.join(missing)}")
    assert found.tokens_a_day is not None and found.equal_tokens_a_day is not None
    lines.append(
        f"simulated with the waits seen: {found.tokens_a_day:,.4g} tokens a day, with equal steps "
        f"{found.equal_tokens_a_day:,.4g} ({found.tokens_a_day / found.equal_tokens_a_day:.2f} times)"
    )
    return lines
