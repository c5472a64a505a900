"""What `submit_ahead` does at one facility: its wait beside the job's time limit, its moment by the measured queue."""

from __future__ import annotations

from statistics import median

from coordinator.config.ahead import AheadSettings, why_not_ahead
from coordinator.config.deployments import Deployment
from coordinator.config.federation import Facility, Federation
from coordinator.preflight.row import Row, ok, skipped, warning
from coordinator.rounds.ahead import read_seen
from coordinator.rounds.ahead_time import Seen, when_to_submit
from coordinator.rounds.late import WORKDIR

CHECK = "submit ahead"


def check_ahead(
    federation: Federation, facility: Facility, hours: float, *, gate_seconds: float | None = None
) -> Row | None:
    """One row where the federation or a facility of it asks for `submit_ahead`, else None.

    `hours`: time limit of a job; `gate_seconds`: that the policy of the facility's gate lets a job wait.
    """
    if not federation.ahead:
        return None
    name = facility.name
    settings = federation.ahead.get(name)
    if settings is None:
        return skipped(name, CHECK, _why_not(facility, facility.deployment))
    if gate_seconds is not None and settings.wait > gate_seconds:
        lets = f"at most {gate_seconds:g} s" if gate_seconds else "not at all"
        found = f"a job waits {settings.wait:g} s at most for its model, and the site's policy lets one wait {lets}"
        fix = f"ask the site to set ahead_seconds: {settings.wait:g} in policy.yml; till then rounds bring their model"
        return warning(name, CHECK, found, fix)
    seen = read_seen(federation.workdir_path / WORKDIR, name)
    return judged(name, settings, seen, limit_seconds=3600 * hours)


def judged(name: str, settings: AheadSettings, seen: Seen, *, limit_seconds: float) -> Row:
    """`limit_seconds`: of one job; 0 where nothing says."""
    choice = when_to_submit(seen, wait=settings.wait, idle=settings.idle)
    waits = f"waits {settings.wait:g} s at most for its model"
    moment = f"the next job is submitted {choice.reason}"
    if not limit_seconds:
        fix = "set one: what a job waits for its model counts against it"
        return warning(name, CHECK, f"a job {waits}, and nothing sets a time limit; {moment}", fix)
    limit = f"of the {limit_seconds:,.0f} s of its time limit"
    if settings.wait >= limit_seconds:
        fix = "lower submit_ahead.wait, or ask for more time: such a job has none left to train"
        return warning(name, CHECK, f"a job {waits}, {limit}", fix)
    longest = max(seen.runs, default=0.0)
    if longest and settings.wait + longest > limit_seconds:
        found = f"a job {waits}, {limit}, and the latest worked {longest:,.0f} s"
        fix = "lower submit_ahead.wait or ask for more time: a job that is cut off saves its state and is queued again"
        return warning(name, CHECK, found, fix)
    if choice.after is None:
        return warning(name, CHECK, moment, "remove submit_ahead here, or leave it for a queue that may grow")
    queue = f"; waits in its queue: {median(seen.waits):.0f} s (median of {len(seen.waits)})" if seen.waits else ""
    return ok(name, CHECK, f"a job {waits}, {limit}; {moment}{queue}")


def _why_not(facility: Facility, deployment: Deployment) -> str:
    reason = why_not_ahead(deployment)
    if reason:
        return f"rounds are submitted with their model: {reason}"
    if facility.submit_ahead is False:
        return "its own `submit_ahead: false`: rounds are submitted with their model"
    return f"a facility of type {deployment.type!r} has no queue to wait in"
