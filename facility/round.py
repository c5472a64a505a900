"""What a job of the workflow runs: one round of one facility, ending in an update or in the reason why there is none.

    python -m facility.round --model DIR --dataset PATH --settings FILE --round N --out update

Ends with 0 (`--out` is a complete update) or with 7 (`--out` holds only `failure.json`): a step of the loop that failed
otherwise would hang the workflow engine. In a job of several tasks all run this command and the first one speaks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from facility.dataset import NAME as DATASET
from facility.exchange.errors import CrossFedError, InputError, ManifestError, exit_on_error
from facility.exchange.files.durable import new_directory
from facility.exchange.files.links import link_tree
from facility.exchange.files.paths import resolve
from facility.exchange.files.storage import is_storage, sentence
from facility.exchange.messages import report
from facility.exchange.messages.comparison import ALONE, MODELS
from facility.exchange.messages.dataset_card import with_dataset
from facility.exchange.messages.manifest import (
    NAME,
    Manifest,
    read_manifest,
    run_of,
    sha256_of,
    verify_manifest,
    with_head,
    with_run,
    write_manifest,
)
from facility.exchange.messages.order import SIGNERS, verify_order
from facility.exchange.messages.outcome import Outcome
from facility.exchange.messages.settings import FacilitySettings, read_facility_settings
from facility.exchange.messages.signatures import sign
from facility.exchange.messages.usage import with_usage
from facility.launch import add_limits, attempt_of, show_failure, tasks_here
from facility.launching.notes import Notes
from facility.launching.supervise import Ending
from facility.rounds.alone import train_alone, work_alone
from facility.rounds.dataset_check import check_dataset
from facility.rounds.dataset_counts import counts_of
from facility.rounds.energy import Meter
from facility.rounds.evaluation import tell_scores, tell_scores_of_models
from facility.rounds.finished import Finished, key_of
from facility.rounds.job import DONE, FAILED, GO, Job, start_ranks, work_of_round
from facility.rounds.kept import default_directory
from facility.rounds.masked import masked
from facility.rounds.models import Models, digest_of, tell
from facility.rounds.sealed import put_aside_damaged
from facility.rounds.smaller import make_smaller
from facility.rounds.sweep import forget_earlier, sweep

AUDIT = "CROSSFED_AUDIT"
"""Environment variable: this facility's audit log, whose head an update's manifest carries."""


def run(job: Job) -> Ending:
    """The first task's part: find the update finished, or train it. Raises `CrossFedError`."""
    check_order(job)
    received = read_manifest(job.arguments.model)
    base = received.content_sha256 if received.kind in (MODELS, ALONE) else digest_of(received)
    if not job.dataset.is_dir():
        raise InputError(
            f"the dataset {job.dataset} is no directory here; expected the output of `python -m facility.prepare`"
        )
    finished = Finished(job.state)
    key = key_of(f"{base} {run_of(received)}".rstrip(), job.arguments.settings, job.dataset)
    with finished.alone(job.round):
        for path in sweep(Path.cwd(), job.settings, job.round, received):
            print(f"round: removed {path}, of an earlier round", file=sys.stderr)
        if received.kind == ALONE:
            return run_alone(job, received)
        masks = masked(job.settings, job.state, job.arguments.roster, job.received, job.round)
        if (found := finished.find(key, job.round)) is not None:
            print(f"round: {found} was finished before from the same model, settings and data: not trained again")
            _clear(job.out)
            if masks is None:
                link_tree(found, job.out)
            else:
                masks.make(found, received=job.received, key=key, out=job.out)
            job.notes.write("first", DONE)
            return Ending(code=0, reason="")
        finished.drop_before(job.round)
        _clear(job.out)
        for told in put_aside_damaged(job.state):
            print(f"round: {told}", file=sys.stderr)
        if (job.dataset / DATASET).is_file():
            check_dataset(job.dataset, job.state)
        if job.keeps_models:
            Models(job.state).whole(job.arguments.model)
        job.personal.put_in(job.received, job.round)
        _clear(job.trained)
        job.trained.parent.mkdir(parents=True, exist_ok=True)
        job.notes.write("first", GO)
        ending = start_ranks(job, work_of_round(job))
        if ending.code not in (Outcome.DONE, Outcome.CHECKPOINTED) and (job.trained / NAME).is_file():
            verify_manifest(job.trained)  # written last: what follows it cannot make the update less complete
            print(f"round: the update was complete when {ending.reason}", file=sys.stderr)
            ending = Ending(code=0, reason="")
        if ending.code == Outcome.DONE:
            check_update(job)
            if job.round < job.settings.rounds:
                job.personal.take_out(job.trained, job.received, job.round)
                make_smaller(
                    job.trained,
                    model=job.received,
                    state=job.state,
                    round=job.round,
                    settings=job.settings.training,
                    patterns=job.personal.patterns,
                )
            if job.keeps_models:
                tell(job.trained, base)
            with_run(job.trained, run_of(received))
            with_usage(job.trained, job.meter.usage(job.notes))
            if received.kind == MODELS:
                tell_scores_of_models(job.arguments.model, job.trained, job.settings, dataset=job.dataset)
            elif job.settings.evaluation.due(job.round, job.settings.rounds):
                tell_scores(job.received, job.trained, job.settings, dataset=job.dataset)
            if job.settings.dataset_card:
                with_dataset(job.trained, counts_of(job.dataset))
            with_head(job.trained, os.environ.get(AUDIT, ""))
            if masks is not None:
                finished.keep(key, job.round, job.trained)
                _clear(job.trained)
                masks.make(finished.place(job.round), received=job.received, key=key, out=job.out)
                return ending
            if job.settings.training.signing_key:
                sign(job.out, resolve(job.settings.training.signing_key))
            finished.keep(key, job.round, job.out)
            forget_earlier(job.state, job.round)
        return ending


def run_alone(job: Job, received: Manifest) -> Ending:
    """The same where the facility is to train alone, to compare with."""
    _clear(job.out)
    ending = train_alone(job, received)
    if ending.code == Outcome.DONE:
        with_run(job.out, run_of(received))
        with_usage(job.out, job.meter.usage(job.notes))
        with_head(job.out, os.environ.get(AUDIT, ""))
        if job.settings.training.signing_key:
            sign(job.out, resolve(job.settings.training.signing_key))
    return ending


def check_order(job: Job) -> None:
    """Raise `InputError` unless this model and these settings may be trained here, before any work is done."""
    model, settings = job.arguments.model, job.arguments.settings
    if job.arguments.approved and job.arguments.approved != [sha256_of(model / NAME), sha256_of(settings)]:
        raise InputError("model or settings are not those that this facility's gate approved: exchanged while waiting")
    if signers := os.environ.get(SIGNERS):
        verify_order(
            model,
            settings,
            federation=job.settings.federation,
            facility=job.settings.facility,
            round=job.round,
            rounds=job.settings.rounds,
            allowed_signers=Path(signers),
        )


def check_update(job: Job) -> None:
    """Raise `ManifestError` unless the training process left what it promised."""
    manifest = read_manifest(job.trained)
    found = (manifest.kind, manifest.federation, manifest.facility, manifest.round)
    expected = ("update", job.settings.federation, job.settings.facility, job.round)
    if found != expected:
        raise ManifestError(f"{job.trained} is {found}, expected {expected}")


def follow(job: Job) -> int:
    """The other tasks' part: train when the first one says so. They never write the update's directory."""
    told = job.notes.wait_for("first", job.arguments.meeting, "the first task")
    if told != GO:
        return Outcome.DONE if told == DONE else Outcome.SKIPPED
    ending = start_ranks(job, work_alone(job) if job.kind == ALONE else work_of_round(job))
    job.meter.tell(job.notes)
    return Outcome.DONE if ending.code == 0 else Outcome.SKIPPED


def first(job: Job) -> int:
    """`run`, with every way to fail turned into `failure.json`."""
    try:
        ending = run(job)
    except CrossFedError as error:
        ending = Ending(code=2, reason=str(error))
    except Exception as error:
        tail = traceback.format_exc()
        told = sentence(error, job.state) if isinstance(error, OSError) and is_storage(error) else repr(error)
        ending = Ending(code=1, reason=f"the round's own command failed: {told}", tail=tail)
    if ending.code == Outcome.DONE:
        return Outcome.DONE
    job.notes.write("first", FAILED)
    ending = _earliest(job, ending)
    show_failure(ending, job.tasks)
    again = ending.code == Outcome.CHECKPOINTED
    reason = "ran out of time; its state is saved, and the same round goes on from there" if again else ending.reason
    fail(
        job.out,
        report.Failure(
            facility=job.settings.facility, round=job.round, reason=reason, log_tail=ending.tail[-8000:], again=again
        ),
        job.settings,
    )
    return Outcome.SKIPPED


def _earliest(job: Job, ending: Ending) -> Ending:
    """The failure that came first, of this task and the others."""
    if job.tasks.tasks == 1 or ending.code == Outcome.CHECKPOINTED:
        return ending
    time.sleep(1.0)  # another node may be about to tell
    told = [note for note in job.notes.failures() if 0 < note.get("time", 0) < (ending.time or float("inf"))]
    others = [note for note in told if note.get("task") != job.tasks.task and "another node" not in note["reason"]]
    if not others:
        return ending
    note = others[0]
    return replace(ending, code=note["code"], reason=f"on node {note['node']}: {note['reason']}", tail=note["tail"])


def fail(out: Path, failure: report.Failure, settings: FacilitySettings | None = None) -> None:
    """Leave `failure.json` alone in `out`; with the `settings` of a facility that signs, under a signed manifest."""
    _clear(out)
    with new_directory(out) as temporary:
        report.write(temporary, failure)
        if settings is not None and settings.training.signing_key:
            write_manifest(
                temporary,
                Manifest(
                    kind="update", federation=settings.federation, facility=settings.facility, round=failure.round
                ),
            )
            with suppress(CrossFedError):  # a key that is away is perhaps the failure that is reported
                sign(temporary, resolve(settings.training.signing_key))


def _clear(out: Path) -> None:
    if out.is_symlink() or out.is_file():
        out.unlink()
    elif out.exists():
        shutil.rmtree(out)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m facility.round", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = p.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="the received global model")
    add(
        "--dataset",
        required=True,
        metavar="PATH",
        help="the prepared dataset at this facility; relative paths count from $CROSSFED_HOME",
    )
    add("--settings", type=Path, required=True, metavar="FILE", help="the facility's settings (JSON)")
    add("--round", type=int, required=True, metavar="N", help="number of the round, from 0")
    add(
        "--roster",
        type=Path,
        metavar="DIR",
        help="who masks with whom, where the settings ask for secure aggregation (coordinator.steps.roster)",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="the update, or failure.json alone")
    add(
        "--state",
        type=Path,
        metavar="DIR",
        help="what is kept between rounds (default: $CROSSFED_STATE/<federation>/<facility>, "
        "or .crossfed/<federation>/<facility> beside the dataset)",
    )
    add(
        "--approved",
        nargs=2,
        metavar=("MODEL", "SETTINGS"),
        help="sha256 of the model's manifest and of the settings, as this facility's gate approved them",
    )
    add("--module", metavar="NAME", help="Python module that trains (default: trainer.module of the settings)")
    add(
        "--meeting",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long the tasks of a job wait for each other (default 600)",
    )
    add_limits(p, silence=7200.0)
    return p


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    facility = "?"
    try:
        tasks = tasks_here()
    except CrossFedError as error:
        # Who we are among the tasks is unknown, so all of them say the same.
        fail(arguments.out, report.Failure(facility=facility, round=arguments.round, reason=str(error)))
        raise SystemExit(Outcome.SKIPPED) from None
    try:
        settings = read_facility_settings(arguments.settings)
        facility = settings.facility
        dataset = resolve(arguments.dataset)
        job = Job(
            arguments=arguments,
            settings=settings,
            tasks=tasks,
            dataset=dataset,
            notes=Notes(Path.cwd(), tasks.job, attempt_of(os.environ)),
            meter=Meter(tasks),
            state=arguments.state or default_directory(settings, dataset),
        )
        return first(job) if tasks.first else follow(job)
    except CrossFedError as error:
        print(f"error: {error}", file=sys.stderr)
        if tasks.first:
            fail(arguments.out, report.Failure(facility=facility, round=arguments.round, reason=str(error)))
        return Outcome.SKIPPED
    except Exception as error:  # a fault of ours must not hang the workflow either
        tail = traceback.format_exc()
        print(tail, file=sys.stderr)
        if tasks.first:
            reason = f"the round's own command failed: {error!r}"
            fail(arguments.out, report.Failure(facility=facility, round=arguments.round, reason=reason, log_tail=tail))
        return Outcome.SKIPPED


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
