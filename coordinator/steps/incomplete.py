"""A round that is not committed: it is asked for again, or it ends the run with a reason in the archive."""

from __future__ import annotations

import logging
from pathlib import Path

from coordinator.archive.many import group_for_display, kind_of, names_of
from coordinator.archive.rounds import Archive
from coordinator.events.event import emit
from coordinator.rounds.late import discount
from coordinator.steps.arrived import Arrived, CollectedRound
from coordinator.steps.next_round import NextRound

log = logging.getLogger(__name__)


def ask_again(round: CollectedRound) -> bool:
    """Whether the round is repeated for the sake of a facility that failed or asked for more time; notes it."""
    archive, settings, number, arrived = round.archive, round.settings, round.number, round.arrived
    attempt = number_of_attempt(archive, number)
    asked = _asked(archive, number, arrived)
    in_time = attempt <= settings.retries + settings.come_backs  # also where several ask in turns
    more_time = in_time and any(
        asked[name] <= settings.come_backs for name, one in arrived.failures.items() if one.again
    )
    failed = {name for name, failure in arrived.failures.items() if failure.kind != "late"}
    if not failed or not (attempt <= settings.retries or more_time):
        return False
    whole = sorted(name for name in failed if not arrived.failures[name].again)
    archive.write_note(
        "attempts",
        {
            "round": number,
            "count": attempt,
            "asked": asked,
            "failures": _describe_failures(arrived),
            "whole": _whole(archive, number, whole),
        },
    )
    log.warning("round %d is asked for again (attempt %d): %s", number, attempt + 1, _describe_failures(arrived))
    emit("again", round=number, reason=f"attempt {attempt + 1}: {_describe_failures(arrived)}")
    return True


def remember_failed(round: CollectedRound) -> None:
    """Note who failed at a round that ends the run: a later start, which asks for it again, sends them the whole model.

    A facility that lost the model of the round before cannot take a difference to it, now or then.
    """
    archive, number, arrived = round.archive, round.number, round.arrived
    failed = [name for name, one in arrived.failures.items() if one.kind != "late" and not one.again]
    note = archive.read_note("attempts")
    kept = note if note.get("round") == number else {"round": number, "count": 0}
    archive.write_note(
        "attempts", kept | {"failures": _describe_failures(arrived), "whole": _whole(archive, number, failed)}
    )


def too_few(round: CollectedRound, *, least: int = 0) -> NextRound:
    """End the run: fewer sound updates than `minimum_facilities`, or than `least` where that is more."""
    found, wanted = len(round.arrived.updates), round.settings.minimum_facilities
    what = f"minimum_facilities is {wanted}"
    if least > wanted:
        what = f"secure aggregation needs {least} (privacy.threshold, privacy.minimum_sum)"
    remember_failed(round)
    return _stop(round, f"round {round.number} got {found} sound updates, {what}: {_describe_failures(round.arrived)}")


def wait_for_late(round: CollectedRound) -> bool:
    """Whether a round that closed too early, with updates that were refused, is opened again for those still to come.

    Those whose updates were refused no longer count in its quorum (`coordinator.streamflow_plugin.closing`).
    """
    archive, number, arrived = round.archive, round.number, round.arrived
    if not any(failure.kind == "late" for failure in arrived.failures.values()):
        return False
    attempt, note = number_of_attempt(archive, number), archive.read_note("attempts")
    kept = note if note.get("round") == number else {}
    archive.write_note("attempts", kept | {"round": number, "count": attempt, "failures": _describe_failures(arrived)})
    discount(Path.cwd().parent, number, [name for name, one in arrived.failures.items() if one.kind != "late"])
    log.warning("round %d waits for late facilities (attempt %d): %s", number, attempt + 1, _describe_failures(arrived))
    emit(
        "again",
        round=number,
        reason=f"attempt {attempt + 1}, for facilities that are late: {_describe_failures(arrived)}",
    )
    return True


def give_up(round: CollectedRound, reason: str) -> NextRound:
    """Repeat the round while `retries` last, else end the run."""
    archive, number = round.archive, round.number
    if (attempt := number_of_attempt(archive, number)) > round.settings.retries:
        return _stop(round, f"{reason}; the same command asks again")
    archive.write_note("attempts", {"round": number, "count": attempt, "failures": reason})
    log.warning("round %d is asked for again (attempt %d): %s", number, attempt + 1, reason)
    emit("again", round=number, reason=f"attempt {attempt + 1}: {reason}")
    return NextRound(round.model, number, proceed=True)


def _stop(round: CollectedRound, reason: str) -> NextRound:
    round.archive.write_note("stopped", {"round": round.number, "reason": reason})
    log.error(reason)
    return NextRound(round.model, round.number, proceed=False)


def number_of_attempt(archive: Archive, number: int) -> int:
    """1 for the first try of round `number`."""
    note = archive.read_note("attempts")
    return int(note["count"]) + 1 if note.get("round") == number else 1


def _asked(archive: Archive, number: int, arrived: Arrived) -> dict[str, int]:
    """How often each facility has asked for more time in round `number`, this time included."""
    note = archive.read_note("attempts")
    before = note.get("asked", {}) if note.get("round") == number else {}
    now = {name for name, failure in arrived.failures.items() if failure.again}
    return {name: int(before.get(name, 0)) + (name in now) for name in sorted({*before, *now})}


def _whole(archive: Archive, number: int, failed: list[str]) -> list[str]:
    """Facilities that are sent the whole model when round `number` is asked for again: they failed at it."""
    note = archive.read_note("attempts")
    return sorted({*failed, *(note.get("whole", []) if note.get("round") == number else [])})


def _describe_failures(arrived: Arrived) -> str:
    """Why each facility failed; of many, each reason once."""
    reasons = {name: failure.reason for name, failure in sorted(arrived.failures.items())}
    groups = group_for_display(reasons, lambda name: kind_of(reasons[name], name))
    return "; ".join(f"{names_of(names)}: {reasons[names[0]]}" for names in groups) or "no facility failed"
