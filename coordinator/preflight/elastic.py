"""What `rounds: {steps: elastic}` means here: where it changes nothing, and each facility's bounds and time limit."""

from __future__ import annotations

from coordinator.config.federation import Federation
from coordinator.preflight.row import Row, ok, warning
from coordinator.steps.outlook import Outlook, in_vain, outlook

CHECK = "steps"
CLOCK_SECONDS = 10.0
"""By which the clocks of coordinator and facility may differ unremarked."""


def outlook_if_elastic(federation: Federation) -> Outlook | None:
    """What elastic steps are expected to mean; None where steps are not elastic."""
    return outlook(federation) if federation.elastic else None


def check_elastic(federation: Federation, ahead: Outlook | None) -> list[Row]:
    """One row on the whole federation; none where steps are not elastic (`ahead` is None)."""
    if ahead is None:
        return []
    if reasons := in_vain(federation):
        fix = "change what is named, or remove rounds.steps"
        return [warning("federation", CHECK, f"rounds.steps is elastic, but {'; '.join(reasons)}", fix)]
    return [ok("federation", CHECK, "; ".join(["a job takes what fits until its round's end", *ahead.remarks]))]


def check_elastic_steps(ahead: Outlook | None, name: str, hours: float) -> Row | None:
    """One row on a facility: its bounds, what is expected, and whether its longest job fits into its time limit.

    `ahead`: None where steps are not elastic; `hours`: time limit of a job, 0 where nothing says.
    """
    if ahead is None:
        return None
    one = ahead.facilities[name]
    found = f"{one.least:,} to {one.most:,} steps a round (training.steps is {one.nominal:,})"
    if (timed := one.timed) is None:
        return ok(name, CHECK, f"{found}; {one.nominal:,} until it and another facility were timed")
    found += f", about {timed.steps:,.0f} expected, {timed.fewest:,} to {timed.most:,} by the waits seen"
    longest = timed.job_seconds(one.most)
    if hours and longest > 3600 * hours:
        fit = max(0, int((3600 * hours - timed.own_seconds) / timed.seconds_per_step))
        found += f"; {one.most:,} steps take {longest:,.0f} s, of which {3600 * hours:,.0f} s are a job's time limit"
        fix = f"ask for more time, or lower rounds.most_steps: {fit:,} steps fit, and a job takes no more under Slurm"
        return warning(name, CHECK, found, f"{fix}; elsewhere one that runs out of time is queued again")
    cost = f"{timed.node_hours(one.least):.3g} to {timed.node_hours(one.most):.3g} node-hours a round"
    return ok(name, CHECK, f"{found}; {cost}, about {timed.node_hours(timed.steps):.3g}")


def check_clock(ahead: Outlook | None, name: str, seconds: float) -> list[Row]:
    """A warning where the facility's clock is ahead by so many seconds, or behind (negative); none if it agrees."""
    if ahead is None or abs(seconds) <= CLOCK_SECONDS:
        return []
    effect = "fewer" if seconds > 0 else "more"
    found = (
        f"its clock is {abs(seconds):,.0f} s {'ahead of' if seconds > 0 else 'behind'} the one here: rounds end at a "
        f"time of day (rounds.steps is elastic), so its jobs take {effect} steps than fit"
    )
    return [warning(name, "clock", found, "set both clocks by NTP (`timedatectl` shows which is not), or ask the site")]
