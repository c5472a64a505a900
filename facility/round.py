"""What a job of the workflow runs: one round of one facility, ending in an update or in the reason why there is none.

    python -m facility.round --model DIR --dataset PATH --settings FILE --round N --out update

Ends with 0 (`--out` is a complete update) or with 7 (`--out` holds only `failure.json`): a step of the loop that failed
otherwise would hang the workflow engine. In a job of several tasks all run this command and the first one reports.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import traceback
from pathlib import Path

from facility.exchange.errors import CrossFedError, exit_on_error
from facility.exchange.exit_codes import ExitCode
from facility.exchange.files.paths import resolve_path
from facility.exchange.files.storage import file_error_sentence, is_storage, with_place
from facility.exchange.logs import add_log_options
from facility.exchange.messages import report
from facility.exchange.messages.comparison import ALONE
from facility.exchange.messages.outcome import WARNING, Outcome
from facility.exchange.messages.settings import read_facility_settings
from facility.launch import add_limits, show_failure, tasks_here
from facility.launching.notes import PLACE, Notes
from facility.launching.place import attempt_of
from facility.launching.supervise import Ending
from facility.rounds.alone import work_alone
from facility.rounds.dataset_budget import count_released, reserve_budget
from facility.rounds.energy import Meter
from facility.rounds.failing import earliest_failure, leave_failure
from facility.rounds.job import DONE, FAILED, GO, Job, start_ranks, work_of_round
from facility.rounds.kept import state_directory, state_path
from facility.rounds.one_round import OneRound
from facility.rounds.order_check import check_order
from facility.rounds.released import check_remembered
from facility.rounds.replaced import check_replaced
from facility.rounds.workdir_check import check_workdir

log = logging.getLogger("facility.round")


def run(job: Job) -> Ending:
    """The first task's part: find the update finished, or train it. Raises `CrossFedError`."""
    check_workdir(Path.cwd())
    check_order(job)
    state_directory(job.arguments.state, job.settings, job.dataset)
    round = OneRound(job)
    reserve_budget(job.settings, job.dataset, state=job.state)
    check_remembered(round.received, job.settings, job.state)
    with round.finished.alone(job.round):
        round.sweep()
        if job.kind == ALONE:
            return round.train_alone()
        round.open()
        if round.finished_before():
            job.notes.write("first", DONE)
            return Ending(code=0, reason="")
        round.prepare()
        job.notes.write("first", GO)
        ending = round.train()
        count_released(job.settings, job.dataset, job.state)
        if ending.code == Outcome.DONE:
            round.compress()
            round.describe()
            round.deliver()
        return ending


def follow(job: Job) -> int:
    """The other tasks' part: train when the first one says so. They never write the update's directory."""
    decision = job.notes.wait_for("first", job.arguments.meeting, "the first task")
    if decision != GO:
        return Outcome.DONE if decision == DONE else Outcome.SKIPPED
    ending = start_ranks(job, work_alone(job) if job.kind == ALONE else work_of_round(job))
    job.meter.note(job.notes)
    return Outcome.DONE if ending.code == 0 else Outcome.SKIPPED


def first(job: Job) -> int:
    """`run`, with every way to fail turned into `failure.json`."""
    try:
        ending = run(job)
    except CrossFedError as error:
        ending = Ending(code=int(ExitCode.INPUT), reason=str(error))
    except Exception as error:
        tail = traceback.format_exc()
        cause = (
            file_error_sentence(with_place(error, [job.state, Path.cwd()]), again=False)
            if is_storage(error)
            else report.text_of(error)
        )
        ending = Ending(code=1, reason=f"the round's own command failed: {cause}", tail=tail)
    if ending.code == Outcome.DONE:
        return Outcome.DONE
    job.notes.write("first", FAILED)
    ending = earliest_failure(job, ending)
    show_failure(ending)
    again = ending.code == Outcome.CHECKPOINTED
    reason = "ran out of time; its state is saved, and the same round goes on from there" if again else ending.reason
    leave_failure(
        job.out,
        report.Failure(
            facility=job.settings.facility, round=job.round, reason=reason, log_tail=ending.tail[-8000:], again=again
        ),
        job.settings,
        job.arguments.model,
    )
    return Outcome.SKIPPED


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
        help="the roster of facilities, where the settings ask for secure aggregation (coordinator.steps.roster)",
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
    add_log_options(p)
    return p


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    check_replaced(arguments.out)
    facility = "?"
    for number in WARNING:  # ranks, while there are any, save and leave; an update that they left is still delivered
        signal.signal(number, lambda *_: None)
    try:
        tasks = tasks_here()
    except CrossFedError as error:
        # Who we are among the tasks is unknown, so all of them say the same.
        leave_failure(arguments.out, report.Failure(facility=facility, round=arguments.round, reason=str(error)))
        raise SystemExit(Outcome.SKIPPED) from None
    try:
        settings = read_facility_settings(arguments.settings)
        facility = settings.facility
        dataset = resolve_path(arguments.dataset)
        job = Job(
            arguments=arguments,
            settings=settings,
            tasks=tasks,
            dataset=dataset,
            notes=Notes(Path(os.environ.get(PLACE) or Path.cwd()), tasks.job, attempt_of(os.environ)),
            meter=Meter(tasks),
            state=state_path(arguments.state, settings, dataset),
        )
        return first(job) if tasks.first else follow(job)
    except CrossFedError as error:
        log.error("%s", error)
        if tasks.first:
            leave_failure(arguments.out, report.Failure(facility=facility, round=arguments.round, reason=str(error)))
        return Outcome.SKIPPED
    except Exception as error:  # a fault of ours must not hang the workflow either
        tail = traceback.format_exc()
        log.error("%s", tail)
        if tasks.first:
            reason = f"the round's own command failed: {report.text_of(error)}"
            leave_failure(
                arguments.out, report.Failure(facility=facility, round=arguments.round, reason=reason, log_tail=tail)
            )
        return Outcome.SKIPPED


if __name__ == "__main__":
    sys.exit(exit_on_error(main, in_job=True))
