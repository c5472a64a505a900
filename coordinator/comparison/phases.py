"""What follows the last round, in the workflow's own loop: training alone, then the models in batches.

Each pass of the loop asks all facilities once, by a directory whose manifest says for what. How far it is lies in the
archive, so that the command that starts a federation goes on here as well.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.archive.rounds import Archive
from coordinator.comparison.account import Account, OwnTraining, read_account, write_account
from coordinator.comparison.candidates import candidates, choose
from coordinator.comparison.models import batches, begin, compared, drop, keep, make_batch, make_order
from coordinator.config.settings import CoordinatorSettings
from coordinator.events.event import emit
from coordinator.rounds.unasked import objection_to
from facility.exchange.errors import ManifestError
from facility.exchange.messages.comparison import (
    ALONE,
    ALONE_OF,
    GLOBAL,
    MODELS,
    OwnModels,
    alone_of,
    expected_of,
    figures_of,
    folders_of,
    missing_of,
    rounds_alone,
    tasks_of,
)
from facility.exchange.messages.evaluation import OF_DATA
from facility.exchange.messages.manifest import Manifest, read_manifest
from facility.exchange.messages.report import Failure
from facility.exchange.text import number_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What the facilities answered in one pass."""

    updates: Mapping[str, Path]
    failures: Mapping[str, Failure]
    rows: Sequence[dict[str, Any]]
    """A row for each facility, as of a round."""


def following(archive: Archive, settings: CoordinatorSettings) -> Path | None:
    """The directory to send next; None where nothing is to be compared, or all is done."""
    wanted, rounds = settings.comparison, len(archive.rounds())
    if wanted is None or not rounds:
        return None
    account = read_account(archive)
    if account is None:
        begin(archive)
        account = Account(after_round=rounds - 1)
        write_account(archive, account)
    if account.over or (not wanted.matrix and not candidates(archive, wanted)):
        drop(archive)
        return None
    if wanted.alone and not account.alone_over:
        if not account.alone:
            account = dataclasses.replace(account, alone=_rounds_that_counted(archive, settings))
            write_account(archive, account)
        under_way = _under_way(account, settings)
        if under_way:
            emit("comparing", round=settings.rounds, what=ALONE)
            whole = any(not one.rounds or one.failed for one in under_way.values())
            return make_order(archive, settings, {name: one.of for name, one in account.alone.items()}, whole=whole)
    planned = _left(archive, settings, account)
    if not planned:  # fewer models than when it was stopped
        write_account(archive, choose(archive, wanted, dataclasses.replace(account, over=True)))
        drop(archive)
        return None
    emit("comparing", round=settings.rounds, what=MODELS)
    own = None if wanted.updates or not wanted.matrix else _own_models(archive, settings, account)
    return make_batch(archive, settings, planned[0], own)


def _left(archive: Archive, settings: CoordinatorSettings, account: Account) -> list[list[str]]:
    """Batches of models that are still to be sent, whatever `models_per_job` and the facilities were before."""
    assert settings.comparison is not None
    done = _evaluated(archive, settings, account)
    left = [name for name in compared(archive, settings) if name == GLOBAL or name not in done]
    return batches(left, settings.comparison.models_per_job)


def _evaluated(archive: Archive, settings: CoordinatorSettings, account: Account) -> list[str]:
    """Models that are done with; where an earlier version noted the number of batches alone, those that it sent."""
    assert settings.comparison is not None
    if account.evaluated or not account.batch:
        return account.evaluated
    planned = batches(compared(archive, settings), settings.comparison.models_per_job)
    return [name for batch in planned[: account.batch] for name in batch if name != GLOBAL]


def take(archive: Archive, settings: CoordinatorSettings, sent: Path, answers: Answers) -> None:
    """Note what the facilities answered to the directory `sent`."""
    account = read_account(archive)
    assert account is not None, "`following` wrote it"
    rows = [*account.rows, *({**row, "purpose": read_manifest(sent).kind} for row in answers.rows)]
    account = dataclasses.replace(account, rows=rows)
    if read_manifest(sent).kind == ALONE:
        account, text = _take_alone(archive, settings, account, answers)
    else:
        account, text = _take_figures(archive, settings, account, read_manifest(sent), answers)
    write_account(archive, account)
    log.info(text)
    emit("compared", round=settings.rounds, text=text)


def _rounds_that_counted(archive: Archive, settings: CoordinatorSettings) -> dict[str, OwnTraining]:
    history = archive.history()
    counts = {
        name: sum(row.facility == name and row.status == "ok" for entry in history for row in entry.facilities)
        for name in settings.facilities
    }
    return {name: OwnTraining(of=count) for name, count in counts.items()}


def _own_models(archive: Archive, settings: CoordinatorSettings, account: Account) -> dict[str, OwnModels]:
    """What each facility evaluates of its own, at its own place: its last update that counted, and training alone."""
    rows, found = [row for entry in archive.history() for row in entry.facilities], {}
    for name in settings.facilities:
        rounds = [row.round - row.staleness for row in rows if row.facility == name and row.status == "ok"]
        alone = account.alone.get(name, OwnTraining())
        found[name] = OwnModels(update=max(rounds, default=None), alone=alone.rounds if alone.done else 0)
    return found


def _under_way(account: Account, settings: CoordinatorSettings) -> dict[str, OwnTraining]:
    """Facilities that are not done, have not failed too often, and have not left the federation."""
    return {
        name: one
        for name, one in account.alone.items()
        if name in settings.facilities
        and not one.done
        and one.failed <= settings.retries
        and one.asked <= settings.come_backs
    }


def _take_alone(
    archive: Archive, settings: CoordinatorSettings, account: Account, answers: Answers
) -> tuple[Account, str]:
    alone = dict(account.alone)
    for name, update in answers.updates.items():
        answer = alone_of(read_manifest(update))
        alone[name] = dataclasses.replace(alone[name], rounds=answer.rounds, tokens=answer.tokens, failed=0, reason="")
        if answer.rounds == alone[name].of and settings.comparison is not None and settings.comparison.updates:
            keep(archive, ALONE_OF, {name: update})
    for name, failure in answers.failures.items():
        before = alone.get(name)
        if before is None or before.done:
            continue
        counted = {"asked": before.asked + 1} if failure.again else {"failed": before.failed + 1}
        alone[name] = dataclasses.replace(before, reason=failure.reason, **counted)
    account = dataclasses.replace(account, alone=alone)
    left = _under_way(account, settings)
    if not left:
        gaps = {
            name: f"trained alone {one.rounds} of {number_of(one.of, 'round')}: {one.reason}"
            for name, one in alone.items()
            if not one.done
        }
        account = dataclasses.replace(account, alone_over=True, gaps=account.gaps | gaps)
    done = ", ".join(f"{name} {one.rounds} of {one.of}" for name, one in alone.items())
    return account, f"training alone, rounds done: {done}"


def _take_figures(
    archive: Archive, settings: CoordinatorSettings, account: Account, sent: Manifest, answers: Answers
) -> tuple[Account, str]:
    figures, tasks = dict(account.figures), dict(account.tasks)
    gaps: dict[str, str] = {}  # of this batch
    folders = folders_of(sent)
    for name, update in answers.updates.items():
        manifest = read_manifest(update)
        expected = expected_of(sent, name)
        found = [dataclasses.asdict(one) for one in figures_of(manifest, expected)]
        figures[name] = _renewed(figures.get(name, []), found)
        every, objection = tasks_of(manifest, expected), ""
        of_data = [one for one in every if one["task"] in OF_DATA]  # with the figures, whatever tasks are asked for
        if scores := [one for one in every if one["task"] not in OF_DATA]:
            objection = objection_to(settings, name, scores, round=settings.rounds, where="comparison of models")
        tasks[name] = _renewed(tasks.get(name, []), [*of_data, *([] if objection else scores)])
        lacking = _lacking(manifest, expected, {one["model"] for one in found})
        if gap := "; ".join(filter(None, (lacking, objection))):
            gaps[name] = gap
    for name, failure in answers.failures.items():
        gaps[name] = f"not evaluated there: {', '.join(folders)}: {failure.reason}"
    tries = account.tries + 1
    failed = {name for name, one in answers.failures.items() if one.kind != "late"}
    again = bool(failed) and tries <= settings.retries
    if again:
        gaps = {name: reason for name, reason in gaps.items() if name not in failed}
    assert settings.comparison is not None
    gaps = {name: with_earlier(account.gaps.get(name, ""), reason) for name, reason in gaps.items()}
    tries = tries if again else 0
    account = dataclasses.replace(account, figures=figures, tasks=tasks, gaps=account.gaps | gaps, tries=tries)
    if not again:
        evaluated = [*_evaluated(archive, settings, account), *(name for name in folders if name != GLOBAL)]
        account = dataclasses.replace(account, batch=account.batch + 1, evaluated=evaluated)
    left = len(_left(archive, settings, account))
    if not left:
        account = dataclasses.replace(account, over=True)
        account = choose(archive, settings.comparison, account)
    places = f"{len(answers.updates)} of {len(settings.facilities)} facilities"
    models = number_of(len(folders), "model")
    return account, f"{models} evaluated at {places} (part {account.batch} of {account.batch + left})"


def _lacking(answer: Manifest, expected: Sequence[str], found: Collection[str]) -> str:
    """Which models a facility has no figures of, and why; '' for none."""
    reasons = missing_of(answer, expected)
    lines = [f"{name}: {reasons.get(name) or 'no figures came of it'}" for name in expected if name not in found]
    return f"not evaluated there: {'; '.join(lines)}" if lines else ""


def with_earlier(before: str, reason: str) -> str:
    """Why figures of an earlier batch are missing, and of this one; it may have been sent before."""
    return reason if not before or before in reason else before if reason in before else f"{before}; {reason}"


def _renewed(before: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Figures of earlier batches and of this one; what was evaluated twice counts as found last."""
    new = {one["model"] for one in found}
    return [*(one for one in before if one["model"] not in new), *found]


def checked(answer: Manifest, sent: Manifest, facility: str) -> bool:
    """Whether the answer `answer` to what was `sent` is a model whose training is over. Raises `ManifestError` where it
    cannot be an answer."""
    if sent.kind != ALONE:
        expected = expected_of(sent, facility)
        figures_of(answer, expected)
        tasks_of(answer, expected)
        missing_of(answer, expected)
        return False
    alone, wanted = alone_of(answer), rounds_alone(sent, facility)
    if alone.of != wanted:
        raise ManifestError(f"it trained alone for {alone.of} rounds, expected {wanted}")
    return alone.rounds == alone.of
