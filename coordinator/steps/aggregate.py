"""`python -m coordinator.steps.aggregate`: average a round's updates, append it to the archive, decide what follows.

Never fails for a facility's fault (a step that fails inside the loop hangs the engine): it ends the loop and leaves the
reason in the archive, where the report step finds it.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from coordinator.aggregate import aggregate
from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.unmasking import Unmasking
from coordinator.archive.audit import log_entry
from coordinator.archive.best import best_round
from coordinator.archive.rounds import CLIPS, Archive, FacilityRow, RoundFile
from coordinator.archive.sweep import sweep_round
from coordinator.comparison.models import keep_updates
from coordinator.comparison.phases import Answers, following, take
from coordinator.config.settings import CoordinatorSettings, read_coordinator_settings
from coordinator.events.event import emit, failures_of
from coordinator.events.outputs import write_outputs
from coordinator.report.trackers import track_round
from coordinator.rounds.acceptance import drop_told
from coordinator.rounds.acceptance import told as changes_told
from coordinator.rounds.order import OUTPUT, order_or_tell
from coordinator.rounds.weight_limit import Capped, cap
from coordinator.steps.arrived import Arrived, drop, sort_out
from coordinator.steps.decide import Decision, decide
from coordinator.steps.following import asks_ahead, within
from coordinator.steps.global_loss import global_losses, losses_of, losses_of_rows, plausible, without_each
from coordinator.steps.guard import Guard, guard
from coordinator.steps.limits import NOTE as LIMITED
from coordinator.steps.limits import UNDER_WAY, seconds_of
from coordinator.steps.rows import rows_of
from coordinator.steps.schedule import decay_factor, with_rate
from coordinator.steps.send import bytes_of, make_message
from facility.exchange.errors import CrossFedError, TryAgain, UpdateRefused, exit_on_error
from facility.exchange.files.durable import write_json
from facility.exchange.files.paths import resolve
from facility.exchange.files.storage import is_storage
from facility.exchange.messages.manifest import read_manifest, run_of, verify_manifest, with_run
from facility.exchange.messages.strict_json import clean


def close_round(
    archive: Archive, settings: CoordinatorSettings, *, model: Path, number: int, arrived: Arrived
) -> tuple[Path, int, bool]:
    """Model, number of the next round, and whether there is one."""
    if number >= settings.rounds:
        return close_final(archive, settings, model, arrived)
    attempt = number_of_attempt(archive, number)
    if ask_again(archive, settings, number, arrived):
        return model, number, True
    while True:
        if len(arrived.updates) < settings.minimum_facilities:
            return too_few(archive, settings, model, number, arrived)
        try:
            return commit(archive, settings, model, number, arrived, attempt)
        except Exception as error:
            blamed = to_blame(error, archive, settings, model, arrived, number)
            if not blamed:
                raise
            print(f"round {number} is averaged without {', '.join(sorted(blamed))}: {clean(str(error) or repr(error))}")
            for name, reason in blamed.items():
                arrived = drop(arrived, name, number, reason)


def ask_again(archive: Archive, settings: CoordinatorSettings, number: int, arrived: Arrived) -> bool:
    """Whether the round is repeated for the sake of a facility that failed or asked for more time; notes it."""
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
            "failures": _told(arrived),
            "whole": _whole(archive, number, whole),
        },
    )
    print(f"round {number} is asked for again (attempt {attempt + 1}): {_told(arrived)}")
    emit("again", round=number, reason=f"attempt {attempt + 1}: {_told(arrived)}")
    return True


def to_blame(
    error: Exception, archive: Archive, settings: CoordinatorSettings, model: Path, arrived: Arrived, number: int
) -> dict[str, str]:
    """The facilities whose updates made the round fail, and why; {} where it is nobody's fault.

    An `UpdateRefused` names one. Of any other exception but a fault of this machine, an update is to blame whose plain
    mean with nothing else fails too, while that of another facility succeeds.
    """
    if isinstance(error, UpdateRefused):
        return {error.facility: str(error)} if error.facility in arrived.updates else {}
    if isinstance(error, TryAgain | MemoryError) or is_storage(error):
        return {}
    failed: dict[str, str] = {}
    for name, update in arrived.updates.items():
        try:
            with tempfile.TemporaryDirectory(prefix=".alone.", dir=archive.path) as scratch:
                _alone(settings, model, name, update, Path(scratch))
        except Exception as own:
            failed[name] = f"its update cannot be averaged: {clean(str(own) or repr(own), 300)}"
    return failed if len(failed) < len(arrived.updates) else {}


def _alone(settings: CoordinatorSettings, model: Path, name: str, update: Path, scratch: Path) -> None:
    """The plain mean of one update. Raises whatever is wrong with it."""
    bytes_of(read_manifest(update))
    plain = AggregationSettings(rule="mean", weights=settings.aggregation.weights)
    aggregate(base=model, updates={name: update}, out=scratch / "model", settings=plain, adapters=settings.lora)


def too_few(
    archive: Archive, settings: CoordinatorSettings, model: Path, number: int, arrived: Arrived, *, least: int = 0
) -> tuple[Path, int, bool]:
    """End the run: fewer sound updates than `minimum_facilities`, or than `least` where that is more."""
    found, wanted = len(arrived.updates), settings.minimum_facilities
    what = f"minimum_facilities is {wanted}"
    if least > wanted:
        what = f"secure aggregation needs {least} (privacy.threshold, privacy.minimum_sum)"
    reason = f"round {number} got {found} sound updates, {what}: {_told(arrived)}"
    return _stop(archive, model, number, reason)


def give_up(
    archive: Archive, settings: CoordinatorSettings, model: Path, number: int, reason: str
) -> tuple[Path, int, bool]:
    """Repeat the round while `retries` last, else end the run."""
    if (attempt := number_of_attempt(archive, number)) > settings.retries:
        return _stop(archive, model, number, f"{reason}; the same command asks again")
    archive.write_note("attempts", {"round": number, "count": attempt, "failures": reason})
    print(f"round {number} is asked for again (attempt {attempt + 1}): {reason}")
    emit("again", round=number, reason=f"attempt {attempt + 1}: {reason}")
    return model, number, True


def _stop(archive: Archive, model: Path, number: int, reason: str) -> tuple[Path, int, bool]:
    archive.write_note("stopped", {"round": number, "reason": reason})
    print(reason)
    return model, number, False


def commit(
    archive: Archive,
    settings: CoordinatorSettings,
    model: Path,
    number: int,
    arrived: Arrived,
    attempt: int,
    unmasking: Unmasking | None = None,
) -> tuple[Path, int, bool]:
    """Average the updates and append the round. Raises `UpdateRefused`; then the archive is as it was."""
    verify_manifest(model)
    aggregation = settings.aggregation
    capped = cap(settings, arrived.reports, model) if unmasking is None else Capped(weights={}, told={})
    if capped.weights:
        aggregation = dataclasses.replace(aggregation, weights=capped.weights)
    watched = _watch(archive, settings, arrived)
    decay = decay_factor(number, settings.rounds, share=aggregation.server_decay_share, to=aggregation.server_decay_to)
    aggregation = with_rate(aggregation, watched.factor * decay)
    with archive.append(number) as directory:
        record = aggregate(
            base=model,
            updates=arrived.updates,
            out=directory / "model",
            settings=aggregation,
            state_in=archive.state_for(number),
            state_out=directory / "state",
            adapters=settings.lora,
            drop_refused=unmasking is None,
            minimum_updates=settings.minimum_facilities,
            unmasking=unmasking,
        )
        if unmasking is not None:
            write_json(directory / CLIPS, unmasking.next_clips())
        with_run(directory / "model", run_of(read_manifest(model)))
        left_out = record.quarantined | record.dropped
        message = make_message(directory, model, settings.sending)
        weights = {entry.facility: entry.weight for entry in record.participants}
        rows = rows_of(archive, settings, number, arrived, weights, left_out)
        told = plausible([*map(losses_of, archive.history()), losses_of_rows(rows)])
        losses = global_losses(told)
        decision = decide(settings, losses, without_each(told))
        now = time.time()
        round_file = RoundFile(
            round=number,
            facilities=[
                dataclasses.replace(row, reason=row.reason or capped.told.get(row.facility, "")) for row in rows
            ],
            message=message,
            model_sha256=read_manifest(directory / "model").content_sha256,
            global_loss=losses[-1],
            global_loss_over=sorted(told[-1]),
            decision=decision.reason,
            ended=not decision.proceed and number + 1 < settings.rounds,
            broken=decision.broken,
            attempts=attempt,
            outer_factor=watched.factor,
            guard=watched.reason,
            decay=decay,
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=seconds_of(archive.read_note(UNDER_WAY), number, now),
            changes=changes_told(archive),
            aggregation=dataclasses.asdict(record),
        )
        round_file = asks_ahead(archive, settings, round_file, directory)
        round_file, decision, limited = within(archive, settings, round_file, decision, now)
        write_json(directory / "round.json", dataclasses.asdict(round_file))
    keep_updates(archive, settings, arrived.updates, left_out)
    log_entry(
        "aggregated",
        round=number,
        model=read_manifest(archive.model_for(number + 1)).content_sha256,
        weights=weights,
        left_out=left_out | {name: failure.reason for name, failure in arrived.failures.items()},
    )
    archive.drop_note("attempts")
    drop_told(archive)
    archive.write_note(UNDER_WAY, {"round": number + 1, "since": time.time(), "whole": True})
    if limited is not None:
        archive.write_note(LIMITED, {"after_round": number, "limit": limited.limit, "reason": limited.reason})
    archive.prune(settings.keep_rounds, also=best_round(losses) if settings.limits else None)
    sweep_round(Path.cwd(), record.federation, number, behind=settings.aggregation.maximum_staleness)
    if watched.reason:
        print(watched.reason)
    print(f"round {number} is complete: {decision.reason}")
    emit("complete", round=number, decision=decision.reason)
    for problem in track_round(archive.path, settings.federation, settings.trackers, round_file):
        print(problem)
        emit("problem", text=problem)
    return _following(archive, settings, number, decision)


def _following(
    archive: Archive, settings: CoordinatorSettings, number: int, decision: Decision
) -> tuple[Path, int, bool]:
    """What comes after a round: the next one, the final evaluation, or the end with its reason."""
    model = archive.model_for(number + 1)
    if decision.proceed:
        return model, number + 1, True
    if decision.broken:
        archive.write_note(
            "stopped",
            {"round": number, "reason": f"{decision.reason}; the models of earlier rounds are in {archive.path}"},
        )
        return model, number + 1, False
    if settings.final_evaluation:
        return model, settings.rounds, True
    return compare_next(archive, settings, model)


def _watch(archive: Archive, settings: CoordinatorSettings, arrived: Arrived) -> Guard:
    """What the guard says, from the archived rounds and what the facilities report of the model they received."""
    if not settings.aggregation.guard:
        return Guard()
    now = {name: report.loss_received for name, report in arrived.reports.items()}
    return guard(global_losses(plausible([*map(losses_of, archive.history()), now])))


def close_final(
    archive: Archive, settings: CoordinatorSettings, model: Path, arrived: Arrived
) -> tuple[Path, int, bool]:
    """After the last round: the final evaluation, then what the comparison of models asks for."""
    rows = rows_of(archive, settings, settings.rounds, arrived, {}, {})
    if read_manifest(model).kind == "model":
        close_evaluation(archive, settings, arrived, rows)
    else:
        size = bytes_of(read_manifest(model))
        told = [dataclasses.asdict(dataclasses.replace(row, sent="full", sent_bytes=size)) for row in rows]
        take(archive, settings, model, Answers(updates=arrived.updates, failures=arrived.failures, rows=told))
        sweep_round(Path.cwd(), settings.federation, settings.rounds, but=model)
    return compare_next(archive, settings, model)


def compare_next(archive: Archive, settings: CoordinatorSettings, model: Path) -> tuple[Path, int, bool]:
    """The next directory of the comparison; the end where there is none."""
    sent = following(archive, settings)
    return (model, settings.rounds, False) if sent is None else (sent, settings.rounds, True)


def close_evaluation(
    archive: Archive, settings: CoordinatorSettings, arrived: Arrived, rows: list[FacilityRow]
) -> None:
    """Note what the facilities found of the final model."""
    told = plausible([*map(losses_of, archive.history()), losses_of_rows(rows)])
    archive.write_note(
        "evaluation",
        {
            "after_round": len(archive.rounds()) - 1,
            "global_loss": global_losses(told)[-1],
            "global_loss_over": sorted(told[-1]),
            "facilities": [dataclasses.asdict(row) for row in rows],
        },
    )
    print(f"the final model is evaluated at {len(arrived.reports)} facilities")


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


def _told(arrived: Arrived) -> str:
    return (
        "; ".join(f"{name}: {failure.reason}" for name, failure in sorted(arrived.failures.items()))
        or "no facility failed"
    )


def arguments_of(program: str, text: str) -> argparse.ArgumentParser:
    """The options of the steps that close a round."""
    parser = argparse.ArgumentParser(prog=program, description=text)
    parser.add_argument(
        "--federation", type=Path, required=True, help="coordinator.json, rendered by `crossfed render`"
    )
    parser.add_argument(
        "--archive", required=True, help="archive directory; relative paths count from $CROSSFED_HOME or the checkout"
    )
    parser.add_argument("--model", type=Path, required=True, help="global model that the round started from")
    parser.add_argument("--round", type=int, required=True, help="number of the round, from 0")
    parser.add_argument("--updates", type=Path, nargs="*", default=[], help="directories from the receive steps")
    return parser


def main() -> int:
    return run_step(arguments_of("python -m coordinator.steps.aggregate", __doc__ or "").parse_args(), close_round)


def run_step(arguments: argparse.Namespace, close: Callable[..., tuple[Path, int, bool]]) -> int:
    """Close the round by `close`; whatever goes wrong ends the run with its reason in the archive."""
    settings = read_coordinator_settings(arguments.federation)
    archive = Archive(resolve(arguments.archive))
    try:
        arrived = sort_out(arguments.updates, settings.facilities, arguments.round)
        outputs = close(archive, settings, model=arguments.model, number=arguments.round, arrived=arrived)
    except Exception as error:  # a step that fails inside the loop hangs the engine
        if not isinstance(error, CrossFedError | OSError):
            traceback.print_exc()
        reason = str(error) if isinstance(error, CrossFedError | OSError) else repr(error)
        with failures_of("aggregate"):
            archive.write_note("stopped", {"round": arguments.round, "reason": reason})
        print(f"round {arguments.round} cannot be closed: {clean(reason)}")
        outputs = arguments.model, arguments.round, False
    write_outputs(model=outputs[0], round=outputs[1], proceed=outputs[2])
    order_or_tell(Path.cwd() / OUTPUT, settings)
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
