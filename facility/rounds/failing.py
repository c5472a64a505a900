"""What a facility leaves of a round that failed: `failure.json`, with the failure that came first."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from facility.exchange.errors import CrossFedError
from facility.exchange.files.durable import new_directory
from facility.exchange.messages import report
from facility.exchange.messages.manifest import Manifest, manifest_if_any, run_of, with_run, write_manifest
from facility.exchange.messages.outcome import Outcome
from facility.exchange.messages.settings import FacilitySettings
from facility.launching.supervise import Ending
from facility.rounds.job import Job, clear_attempt
from facility.rounds.signing import sign_update

NOTE_SECONDS = 1.0
"""Another node that failed at the same time may still be about to note why."""


def earliest_failure(job: Job, ending: Ending) -> Ending:
    """The failure that came first, of this task and the others."""
    if job.tasks.tasks == 1 or ending.code == Outcome.CHECKPOINTED:
        return ending
    time.sleep(NOTE_SECONDS)
    earlier = [note for note in job.notes.failures() if 0 < note.get("time", 0) < (ending.time or float("inf"))]
    others = [note for note in earlier if note.get("task") != job.tasks.task and "another node" not in note["reason"]]
    if not others:
        return ending
    note = others[0]
    return replace(ending, code=note["code"], reason=f"on node {note['node']}: {note['reason']}", tail=note["tail"])


def leave_failure(
    out: Path, failure: report.Failure, settings: FacilitySettings | None = None, received: Path | None = None
) -> None:
    """Leave `failure.json` alone in `out`; with the `settings` of a facility that signs, under a signed manifest.

    The manifest is of the run of the `received` model. Without the end of the output where that stays at the facility.
    """
    if not report.output_leaves():
        failure = replace(failure, log_tail="")
    clear_attempt(out)
    with new_directory(out) as temporary:
        report.write(temporary, failure)
        if settings is not None and settings.training.signing_key:
            write_manifest(
                temporary,
                Manifest(
                    kind="update", federation=settings.federation, facility=settings.facility, round=failure.round
                ),
            )
            if (model := manifest_if_any(received) if received is not None else None) is not None:
                with_run(temporary, run_of(model))
            with suppress(CrossFedError):  # a key that is away is perhaps the failure that is reported
                sign_update(temporary, settings, failure.round)
