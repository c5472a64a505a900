"""`crossfed explain FACILITY` and `explain round N`: why a facility is absent, waiting or refused, in sentences."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from coordinator.archive.journal import Entry, Journal, without_rewound
from coordinator.archive.many import MOST_ROWS, group_for_display, kind_of, names_of, too_many_to_list
from coordinator.archive.rounds import Archive, FacilityRow
from coordinator.config.federation import Federation
from coordinator.engine.live import Snapshot, facility_sentence, read_snapshot
from coordinator.report.advice import advice_for
from coordinator.shown_text import safe_line
from facility.exchange.errors import InputError
from facility.exchange.text import number_of

LOG_LINES = 20
OUT = ("failed", "absent", "refused")


def explain_facility(federation: Federation, name: str) -> str:
    """How a facility stands, why, and what to do."""
    archive = Archive(federation.archive_path)
    entries = without_rewound(Journal(archive.path).read())
    lines = [f"{name}:", *_now(federation.workdir_path, name)]
    own = [entry for entry in entries if entry.facility == name]
    if (stuck := _latest(own, "stuck", until=("started", "trained"))) is not None:
        said = f"{safe_line(stuck.detail.get('reason', ''))}"
        lines.append(f"  Its job {stuck.detail.get('job', '')} will not begin by itself ({said}).")
        lines.append(f"  What to do: {safe_line(stuck.detail.get('advice', ''))}")
    if (login := _latest(own, "login_refused", until=("login_works",))) is not None:
        lines.append(f"  Since {_when(login.time)} it refuses the login: {safe_line(login.detail.get('reason', ''))}.")
        lines.append(f"  What to do: `crossfed login {name}`; its jobs and the other facilities go on.")
    rows = [row for entry in archive.history() for row in entry.facilities if row.facility == name]
    lines += _history(rows)
    last = _latest(own, "refused", until=("verified",))
    bad = next((row for row in reversed(rows) if row.status in OUT), None)
    if last is not None:
        lines += _refusal(name, last.round, safe_line(last.detail.get("reason", "")), own)
    elif bad is not None:
        lines += _refusal(name, bad.round, safe_line(bad.reason), own)
    return "\n".join(lines)


def explain_round(federation: Federation, number: int) -> str:
    """What became of a round, facility by facility. Raises `InputError` for a round that has not begun."""
    archive = Archive(federation.archive_path)
    entries = without_rewound(Journal(archive.path).read())
    own = [entry for entry in entries if entry.round == number]
    if number in archive.rounds():
        record = archive.read_round(number)
        attempts = f" after {record.attempts} attempts" if record.attempts > 1 else ""
        lines = [f"Round {number} is complete{attempts}, finished {record.finished}: {safe_line(record.decision)}."]
        sound = [row for row in record.facilities if row.status == "ok"]
        if too_many_to_list(sound):
            lines.append(_all_that_took_part(sound))
        for row in record.facilities:
            if row.status == "ok" and (row.reason or not too_many_to_list(sound)):
                note = f" ({safe_line(row.reason)})" if row.reason else ""
                lines.append(f"  {row.facility} took part with weight {row.weight:.3f}{note}.")
        out = {row.facility: safe_line(row.reason) for row in record.facilities if row.status != "ok"}
        return "\n".join(lines + _refusals(out, number, entries))
    done = len(archive.rounds())
    if number >= federation.rounds <= done:
        raise InputError(
            f"there is no round {number}: the rounds count from 0 to {done - 1}, and all are complete; "
            "`crossfed status` shows the evaluation of the final model"
        )
    if not own:
        raise InputError(f"round {number} has not begun; the next one is round {done}")
    lines = [f"Round {number} is not complete.", *_idle(read_snapshot(federation.workdir_path))]
    out, states = {}, {}
    for name in (one.name for one in federation.facilities):
        mine = [entry for entry in own if entry.facility == name]
        if (bad := _latest(mine, "refused", until=("verified",))) is not None:
            out[name] = safe_line(bad.detail.get("reason", ""))
        else:
            states[name] = _state(mine)
    lines += _states(states) + _refusals(out, number, entries)
    if reason := str(archive.read_note("stopped").get("reason", "")):
        lines.append(f"The run stopped: {safe_line(reason)}. What to do: {advice_for(reason)}")
    return "\n".join(lines)


def _all_that_took_part(rows: Sequence[FacilityRow]) -> str:
    weights = [row.weight for row in rows]
    return f"  {len(rows)} facilities took part with weights of {min(weights):.3g} to {max(weights):.3g}."


def _states(found: Mapping[str, tuple[str, str]]) -> list[str]:
    """How far each facility was; of many, one line for all that are as far."""
    lines = []
    for names in group_for_display(found, lambda name: found[name][0]):
        words, since = found[names[0]]
        alone = len(names) == 1
        whose = names[0] if alone else f"{len(names)} facilities ({names_of(names)})"
        lines.append(f"  {whose}: {words}{since if alone else ''}.")
    return lines


def _refusals(reasons: Mapping[str, str], number: int, entries: Sequence[Entry]) -> list[str]:
    """Why facilities were left out of a round; of many, once for all that were for the same reason."""
    lines = []
    for names in group_for_display(reasons, lambda name: kind_of(reasons[name], name)):
        lines += _refusal(names[0], number, reasons[names[0]], entries)
        if names[1:]:
            lines.append(f"  So are {len(names) - 1} more: {names_of(names[1:], MOST_ROWS)}.")
    return lines


def _idle(snapshot: Snapshot | None) -> list[str]:
    """A line that says that no run goes on, where none does: states of jobs are then those at the last one's end."""
    if snapshot is None:
        return ["  No run goes on, and the work directory knows of none before."]
    if not snapshot.alive:
        why = f": {safe_line(snapshot.ended)}" if snapshot.ended else ""
        return [f"  No run goes on; the last one ended {_when(snapshot.time)}{why}."]
    return []


def _now(workdir: Path, name: str) -> list[str]:
    snapshot = read_snapshot(workdir)
    if snapshot is None or not snapshot.alive:
        return _idle(snapshot)
    one = snapshot.facilities.get(name)
    return (
        [f"  Now: {facility_sentence(one, time.time(), snapshot.unit)} ({snapshot.heading})."]
        if one is not None
        else []
    )


def _history(rows: Sequence[FacilityRow]) -> list[str]:
    if not rows:
        return ["  It has taken part in no complete round."]
    good = [row for row in rows if row.status == "ok"]
    lines = [f"  It took part in {len(good)} of {number_of(len(rows), 'complete round')}."]
    out = [f"{row.round} ({row.status})" for row in rows if row.status in OUT]
    return lines + ([f"  Rounds without it: {', '.join(out[-10:])}."] if out else [])


def _refusal(name: str, number: int | None, reason: str, entries: Sequence[Entry]) -> list[str]:
    """Why a facility was left out of a round, the end of its log, and what to do."""
    lines = [f"  {name} is out of round {number}: {reason}."]
    job, ending = _ending(name, number, entries)
    if ending:
        lines.append(f"  The scheduler's account: {f'job {job}' if job else 'the job of that round'} {ending}.")
    logs = [one for one in entries if one.kind == "log" and one.facility == name and one.round == number]
    if logs:
        lines.append("  The end of its log:")
        lines += [f"    | {safe_line(line)}" for line in logs[-1].detail.get("lines", [])[-LOG_LINES:]]
    if (held := _given_up(name, job, ending, entries)) is not None:
        why, advice = (safe_line(held.detail.get(key, "")) for key in ("reason", "advice"))
        lines.append(f"  It could not begin by itself ({why}), and a run cancels such a job after `give_up_minutes`.")
        return [*lines, f"  What to do where the next one waits for that, too: {advice}"]
    return [*lines, f"  What to do: {advice_for(reason, ending)}".replace("FACILITY", name)]


def _given_up(name: str, job: str, ending: str, entries: Sequence[Entry]) -> Entry | None:
    """Where this job was cancelled while it was stuck: what was reported of it."""
    if "CANCEL" not in ending:
        return None
    return _latest([one for one in entries if one.facility == name and one.detail.get("job") == job], "stuck", until=())


def _ending(name: str, number: int | None, entries: Sequence[Entry]) -> tuple[str, str]:
    """The last job of that round and how it ended, where it did not end well; '' where nothing is known."""
    own = [one for one in entries if one.facility == name and one.round == number]
    ended = next((one for one in reversed(own) if one.kind == "trained"), None)
    jobs = [str(one.detail["job"]) for one in own if one.kind in ("queued", "started") and one.detail.get("job")]
    return (jobs[-1] if jobs else "", safe_line(ended.detail.get("problem", "")) if ended is not None else "")


def _state(entries: Sequence[Entry]) -> tuple[str, str]:
    """How far a facility was in a round, from its events, and since when."""
    words = {
        "queued": "its job waits in the queue",
        "started": "its job has begun",
        "requeued": "its job was requeued by the scheduler and waits in the queue again",
        "stage": "its job is at work",
        "trained": "its job has ended and its update has not been received",
        "transferred": "its update has arrived and has not been verified",
        "verified": "its update is verified; the round waits for others or for aggregation",
        "sent": "the model has been sent, its job has not been submitted",
    }
    last = next((entry for entry in reversed(entries) if entry.kind in words), None)
    if last is None:
        return "nothing has happened yet", ""
    return words[last.kind], f" (since {_when(last.time)})"


def _latest(entries: Sequence[Entry], kind: str, *, until: Sequence[str]) -> Entry | None:
    """The last entry of a kind that no later one of `until` has settled."""
    for entry in reversed(entries):
        if entry.kind in until:
            return None
        if entry.kind == kind:
            return entry
    return None


def _when(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
