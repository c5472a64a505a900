"""`python -m coordinator.steps.start`: the first step of the workflow; begins a federation or goes on with it."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from coordinator.archive.audit import log_entry
from coordinator.archive.best import best_round
from coordinator.archive.rewind import finish_rewind, write_rewinds
from coordinator.archive.rounds import Archive, RoundFile
from coordinator.archive.sweep import sweep_round
from coordinator.config.closing import carries_late
from coordinator.config.settings import CoordinatorSettings, read_coordinator_settings
from coordinator.events.event import emit, failures_of
from coordinator.masking.pending import forget_complete
from coordinator.rounds.acceptance import take_over
from coordinator.rounds.late import forget_all, forget_discounted, forget_jobs
from coordinator.rounds.order import order
from coordinator.steps.decide import decide_after
from coordinator.steps.final import compare_next
from coordinator.steps.following import ends_anew
from coordinator.steps.global_loss import deviations_by_model, losses_by_model, losses_known, plausible, renewed_in
from coordinator.steps.incomplete import number_of_attempt
from coordinator.steps.limits import MOVED, UNDER_WAY, exceeded_in
from coordinator.steps.limits import NOTE as LIMITED
from coordinator.steps.next_round import NextRound
from coordinator.steps.options import step_parser
from coordinator.steps.telling import report_unreported
from facility.exchange.errors import InputError, ManifestError, exit_on_error
from facility.exchange.files import present
from facility.exchange.files.paths import resolve_path
from facility.exchange.messages.manifest import verify_manifest
from facility.exchange.text import number_of

log = logging.getLogger("coordinator.steps.start")

REOPENED = "reopened"
"""Note of the archive: after which round it goes on although that one had ended it."""
GROUPS = "groups"
"""Folder of an archive that rounds do not begin in."""


def start(archive: Archive, model: Path, settings: CoordinatorSettings) -> NextRound:
    """Open the archive, clean up after an engine that was killed, and say with which round the loop begins.

    Raises `InputError` when the archive does not fit the federation, `ManifestError` when its last model is damaged.
    """
    if (archive.path / GROUPS).exists():
        raise InputError(
            f"archive {archive.path} holds groups, which CrossFed 0.1 was the last version to read: choose another "
            f"archive; the newest model in {archive.path / GROUPS} can be its `model`"
        )
    archive.begin(model, settings.federation)
    archive.clean()
    if said := finish_rewind(archive):
        log.warning(said)
    archive.drop_note("stopped")
    changes = take_over(archive, settings.described)
    for change in changes:
        log.info("changed: %s", change)
        emit("problem", text=f"changed: {change}")
    done = archive.rounds()
    archive.write_history()
    report_unreported(archive, settings)
    history = archive.history()
    if any(change.key.startswith("stop.") for change in changes):
        reopen(archive, settings, history)
    kept = best_round(losses_known(history)) if settings.limits else None
    archive.prune(settings.keep_rounds, also=kept)
    following = len(done)
    forget_complete(archive, following if settings.masks else following + 1)  # + 1: masks were switched off
    if not done and not archive.read_note(UNDER_WAY):  # an interrupted first round keeps its late jobs
        forget_all(Path.cwd().parent)
    if number_of_attempt(archive, following) == 1:
        forget_discounted(Path.cwd().parent)
    discard_late(Path.cwd().parent, settings)
    # No engine runs yet, so what a killed one left goes, but for models that its late jobs may still read here.
    sweep_round(Path.cwd(), settings.federation, following, behind=settings.aggregation.maximum_staleness)
    current = archive.model_for(following)
    verify_whole(archive, following)
    write_rewinds(archive, current, current, archive.message_for(following))
    if goes_on(archive, settings, history):
        check_state_is_there(archive, following)
        before = archive.read_note(UNDER_WAY)
        interrupted = before.get("round") == following
        ends_anew(archive, settings)
        archive.write_note(UNDER_WAY, {"round": following, "since": time.time(), "whole": not interrupted})
        return NextRound(current, following, proceed=True)
    if settings.final_evaluation and archive.read_note("evaluation").get("after_round") != done[-1]:
        return NextRound(current, settings.rounds, proceed=True)
    return compare_next(archive, settings, current)


def discard_late(workdir: Path, settings: CoordinatorSettings) -> None:
    """Say which updates were late when `rounds` was changed or their facility left: no round takes them any longer."""
    for job in forget_jobs(workdir, settings.facilities if carries_late(settings.closing) else ()):
        left = job.facility not in settings.facilities
        when = "it left the federation" if left else "rounds.quorum or rounds.late was changed"
        then = "it is discarded" + ("" if left else ", and the facility begins with the newest model")
        text = f"{job.facility}'s update of round {job.round} was late when {when}: {then}"
        log.warning(text)
        emit("problem", text=text)


def reopen(archive: Archive, settings: CoordinatorSettings, history: Sequence[RoundFile]) -> None:
    """Note that a federation goes on which the early end that stood under `stop` had ended, and the one that stands
    there now does not."""
    if not history or not history[-1].ended or archive.read_note(LIMITED).get("after_round") == history[-1].round:
        return
    rows = [entry.facilities for entry in history]
    reported = plausible(losses_by_model(rows))
    if decide_after(settings, reported, renewed_in(history), deviations_by_model(rows)).proceed:
        archive.write_note(REOPENED, {"after_round": history[-1].round})


def goes_on(archive: Archive, settings: CoordinatorSettings, history: Sequence[RoundFile]) -> bool:
    """Whether another round follows: not after the last, nor after an early end, nor where a limit forbids it.

    A limit that was moved, or another `stop` (`reopen`), lets a federation go on that it had ended. Raises `InputError`
    where there is not even time for the first round.
    """
    following = len(history)
    note = archive.read_note(LIMITED)
    limited = note.get("after_round") == following - 1
    reopened = archive.read_note(REOPENED).get("after_round") == following - 1
    if following >= settings.rounds or (history and history[-1].ended and not (limited or reopened)):
        return False
    found = exceeded_in(archive, settings, history, time.time())
    if found is None:
        if limited:  # until the round that follows is there: killed before, it is asked for again
            archive.write_note(LIMITED, note | {MOVED: True})
        else:
            archive.drop_note(LIMITED)
        return True
    if not history:
        raise InputError(f"{found.reason}: no round can begin; set rounds.{found.limit} anew, or leave it out")
    archive.write_note(LIMITED, {"after_round": following - 1, "limit": found.limit, "reason": found.reason})
    log.warning(found.reason)
    emit("problem", text=found.reason)
    return False


def verify_whole(archive: Archive, following: int) -> None:
    """Raise `ManifestError` when the model, the float32 master or an optimizer tensor of round `following` is
    damaged: before a job is submitted, with the way back."""
    state = archive.state_for(following)
    try:
        verify_manifest(archive.model_for(following))
        if state is not None and present.is_dir(state):
            verify_manifest(state)
    except ManifestError as error:
        if not following:
            raise
        raise ManifestError(f"{error.found}; {way_back(archive, following)}") from None


def check_state_is_there(archive: Archive, following: int) -> None:
    """Raise `ManifestError` when round `following` could not be closed for want of its state, before it is begun."""
    state = archive.state_for(following)
    if state is not None and not present.is_dir(state):
        raise ManifestError(f"{state} is missing; {way_back(archive, following)}")


def way_back(archive: Archive, following: int) -> str:
    """What to do where something that round `following` begins from is damaged."""
    return f"restore that file from a copy, {archive.way_back(following - 1)}, whose updates are asked for again"


def main() -> int:
    parser = step_parser("start", __doc__, "archive")
    parser.add_argument("--model", type=Path, required=True, help="initial Hugging Face checkpoint")
    arguments = parser.parse_args()
    with failures_of("start"):
        settings = read_coordinator_settings(arguments.federation)
        archive = Archive(resolve_path(arguments.archive))
        following = start(archive, arguments.model.resolve(), settings)
        model, number, proceed = following
        log_entry("started", federation=settings.federation, round=number, proceed=proceed)
    if not proceed:
        log.info("nothing left to do, complete: %s", number_of(len(archive.rounds()), "round"))
    else:
        log.info("round %d: starting from %s", number, model)
        emit("starting", round=number, model=str(model))
    with failures_of("start"):
        order(following.deliver(), settings)
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main, in_job=True))
