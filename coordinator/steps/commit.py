"""Commit a round: average its updates, append it to the archive, decide what follows.

The stages read and fill one object, in the order of its fields; until the archive appends the round, nothing of it is
visible.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path

from coordinator.aggregation.record import RoundRecord
from coordinator.aggregation.request import Request
from coordinator.aggregation.run import aggregate
from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.unmasking import Unmasking
from coordinator.archive.best import best_round
from coordinator.archive.privacy import reported_deviations
from coordinator.archive.rewind import rewind_remarks, rounds_set_aside, write_rewinds
from coordinator.archive.rounds import CLIPS, FacilityRow, RoundFile
from coordinator.archive.sweep import sweep_round
from coordinator.comparison.models import keep_updates
from coordinator.config.settings import CoordinatorSettings
from coordinator.events.event import emit
from coordinator.rounds.acceptance import drop_recorded_changes, unrecorded_changes
from coordinator.rounds.late import read_wait
from coordinator.rounds.participation import Done, Work, delivered, participation, weight_of, work_in_a_delivery
from coordinator.rounds.presence import present_share
from coordinator.rounds.verification import verified_as_averaged
from coordinator.rounds.weight_limit import Capped, cap, weight_limit_of
from coordinator.steps.arrived import CollectedRound
from coordinator.steps.decide import Decision, decide_after
from coordinator.steps.final import compare_next
from coordinator.steps.following import asks_ahead, within_limits, write_released_steps
from coordinator.steps.global_loss import (
    Renewed,
    deviations_by_model,
    global_losses,
    later_than,
    losses_by_model,
    losses_of,
    plausible,
    renewed_in,
)
from coordinator.steps.guard import Guard, guard, noise_of
from coordinator.steps.incomplete import number_of_attempt
from coordinator.steps.limits import NOTE as LIMITED
from coordinator.steps.limits import UNDER_WAY, Exceeded, seconds_of
from coordinator.steps.next_round import NextRound
from coordinator.steps.rows import rows_of
from coordinator.steps.schedule import decay_factor, with_rate
from coordinator.steps.send import make_message
from coordinator.steps.telling import feed_trackers, log_aggregated, note_unreported
from facility.exchange.errors import UpdateRefused
from facility.exchange.files.durable import write_json
from facility.exchange.messages.manifest import read_manifest, run_of, with_run

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Commit(CollectedRound):
    """One round that is being committed."""

    attempt: int
    """1 for the first try of the round."""
    unmasking: Unmasking | None = None
    """What takes the masks off; None: the updates are not masked."""

    # open
    capped: Capped = field(default_factory=lambda: Capped(weights={}, reasons={}))
    """Weights that the facilities report, limited."""
    watched: Guard = field(default_factory=Guard)
    decay: float = 1.0
    """Of the server learning rate, over the last rounds."""
    present: float = 1.0
    """Of the server learning rate, in a round that facilities miss."""
    aggregation: AggregationSettings = field(init=False)
    """As the settings say, with these weights."""

    # write
    record: RoundRecord = field(init=False)

    # describe
    losses: list[float | None] = field(default_factory=list)
    """Global validation loss of the model that each round received."""
    decision: Decision = field(init=False)
    round_file: RoundFile = field(init=False)
    limited: Exceeded | None = None
    """The deadline or budget that another round is expected to exceed."""

    @cached_property
    def history(self) -> list[RoundFile]:
        """The rounds before this one."""
        return self.archive.history()

    @cached_property
    def work(self) -> Work:
        """What an update counts for of the work that was done for it."""
        return work_of(self.settings, self.model)

    @property
    def weights(self) -> dict[str, float]:
        """Share of each facility in the next model."""
        return {entry.facility: entry.weight for entry in self.record.participants}

    @property
    def left_out(self) -> dict[str, str]:
        """Facilities whose updates are not in the next model, with the reason."""
        return self.record.quarantined | self.record.dropped


def commit(collected: CollectedRound, unmasking: Unmasking | None = None) -> NextRound:
    """Average the updates and append the round: model, number of the next round, and whether there is one.

    `unmasking`: what takes the masks off; None: the updates are not masked. Raises `UpdateRefused`; then the archive is
    as it was.
    """
    attempt = number_of_attempt(collected.archive, collected.number)
    round = Commit(**vars(collected), attempt=attempt, unmasking=unmasking)
    open_round(round)
    with round.archive.append(round.number) as directory:
        write_model(round, directory)
        describe_round(round, directory)
        keep_beside(round)
    clean_up(round)
    announce(round)
    return following(round)


def open_round(round: Commit) -> None:
    """Limit the weights that the facilities report."""
    round.aggregation = round.settings.aggregation
    if round.unmasking is None:
        round.capped = cap(round.settings, round.arrived.reports, round.model)
    if round.capped.weights:
        round.aggregation = dataclasses.replace(round.aggregation, weights=round.capped.weights)
    closing = round.settings.closing
    by_rounds = closing is not None and closing.late_weight == "participation"
    if by_rounds or counts_work(round):
        round.aggregation = by_participation(round, by_rounds=by_rounds)


def rated(round: Commit, settings: AggregationSettings, left_out: Collection[str]) -> AggregationSettings:
    """`settings` with the server learning rate by guard, schedule and whose updates are averaged: all but `left_out`.

    What is left out of the model, as an outlier or since a value of it is not finite, is as absent as what never came:
    so do later rounds read it in the archive.
    """
    reports = {name: report for name, report in round.arrived.reports.items() if name not in left_out}
    if settings.incomplete_rate == "share":
        kind = round.settings.aggregation.weights
        own = kind if isinstance(kind, dict) else {name: weight_of(report, kind) for name, report in reports.items()}
        there = {name: round.capped.weights.get(name, own.get(name, 0.0)) for name in reports}
        round.present = present_share(round.history, there, round.settings.facilities, round.settings.aggregation)
    if settings.guard:
        # What a late one received was the model of an earlier round.
        now = {name: report for name, report in reports.items() if report.round == round.number}
        received = {name: report.loss_received for name, report in now.items()}
        reported = plausible([*map(losses_of, round.history), received])
        noised = round.settings.privacy is not None and round.settings.privacy.differential is not None
        noise = noise_of(reported, reported_deviations(round.history, now)) if noised else ()
        round.watched = guard(global_losses(reported, renewed_by(round)), noise)
    share, to = settings.server_decay_share, settings.server_decay_to
    round.decay = decay_factor(round.number, round.settings.rounds, share=share, to=to)
    return with_rate(settings, round.watched.factor * round.decay * round.present)


def renewed_by(round: Commit) -> Renewed:
    """Whose validation data were changed, by round, this one with them."""
    return renewed_in(round.history, unrecorded_changes(round.archive))


def counts_work(round: Commit) -> bool:
    """True if updates count by what was done for them, and that differs from round to round."""
    return round.settings.even is not None and round.settings.aggregation.weights in ("tokens", "samples")


def by_participation(round: Commit, *, by_rounds: bool) -> AggregationSettings:
    """Weights in which facilities that have delivered often, or much, count less.

    `by_rounds`: in place of those by lateness.
    """
    kind, reports = round.aggregation.weights, round.arrived.reports
    own, history = own_weights(round), round.history
    shares = delivered(history, reports) if by_rounds else dict.fromkeys(reports, 1.0)
    if counts_work(round):
        each = work_in_a_delivery(history, reports, round.work)
        shares |= {name: shares.get(name, 1.0) * one for name, one in each.items() if one > 0}
    weights = {name: own[name] * factor for name, factor in participation(shares, reports).items() if name in own}
    if without := [name for name in sorted(weights) if not weights[name] > 0]:
        raise UpdateRefused(without[0], f"its weight is {weights[without[0]]:g} ({kind}), expected more than 0")
    exponent = 0.0 if by_rounds else round.aggregation.staleness_exponent
    return dataclasses.replace(round.aggregation, weights=weights, staleness_exponent=exponent)


def work_of_round(round: Commit) -> dict[str, float] | None:
    """By facility, within the bounds of `rounds`, as a multiple of its settings' steps; None where all take those."""
    even = round.settings.even
    if even is None or round.unmasking is not None:
        return None
    nominal = round.settings.steps
    taken = {name: report.steps / nominal[name] for name, report in round.arrived.reports.items() if nominal.get(name)}
    return {name: min(max(share, even.least_steps), even.most_steps) for name, share in taken.items()}


def work_of(settings: CoordinatorSettings, model: Path) -> Work:
    """A facility's work in a round, as a multiple of its settings' steps.

    At least what the weight that it claims is of the most that it may claim, so that nobody gains by claiming many
    tokens in few steps.
    """
    even, kind = settings.even, settings.aggregation.weights
    assert even is not None and isinstance(kind, str)
    limits = {name: weight_limit_of(settings, name, model) for name in settings.steps}

    def work(name: str, done: Done) -> float:
        if not (nominal := settings.steps.get(name)):
            return 1.0  # it has left
        limit = limits[name]
        claimed = getattr(done, kind) / getattr(limit, kind) * even.bounds(nominal)[1] / nominal if limit else 0.0
        return float(max(done.steps / nominal, claimed))

    return work


def with_work(round: Commit, rows: list[FacilityRow]) -> list[FacilityRow]:
    """The rows with the work of each update, which the settings of later rounds do not say."""
    if not counts_work(round):
        return rows
    return [dataclasses.replace(row, work=round.work(row.facility, row)) if row.status == "ok" else row for row in rows]


def own_weights(round: Commit) -> dict[str, float]:
    """What updates weigh, by facility: as the settings say, else by their reports."""
    kind = round.aggregation.weights
    if isinstance(kind, dict):
        return kind
    return {name: weight_of(report, kind) for name, report in round.arrived.reports.items()}


def write_model(round: Commit, directory: Path) -> None:
    """Aggregate the updates into the next model, below the round's directory. Raises `UpdateRefused`."""
    settings = round.settings
    round.record = aggregate(
        Request(
            base=round.model,
            updates=round.arrived.updates,
            out=directory / "model",
            settings=round.aggregation,
            state_in=round.archive.state_for(round.number),
            state_out=directory / "state",
            adapters=settings.lora,
            seed=settings.seed,
            drop_refused=round.unmasking is None,
            minimum_updates=settings.minimum_facilities,
            unmasking=round.unmasking,
            verify_base=True,
            verify_updates=verified_as_averaged(settings),
            work=work_of_round(round),
            facilities=settings.facilities,
            rated=partial(rated, round),
        )
    )
    if round.unmasking is not None:
        write_json(directory / CLIPS, round.unmasking.next_clips())
    with_run(directory / "model", run_of(read_manifest(round.model)))


def describe_round(round: Commit, directory: Path) -> None:
    """Write the message for the facilities and round.json, with the decision on what follows."""
    archive, settings, number, history = round.archive, round.settings, round.number, round.history
    message = make_message(directory, round.model, settings.sending)
    before = history[-1] if history else None
    rows = with_work(round, rows_of(round, round.weights, round.left_out, before))
    every = [*(entry.facilities for entry in history), rows]
    reported = plausible(losses_by_model(every))
    renewed = renewed_by(round)
    losses = round.losses = global_losses(reported, renewed)
    decision = round.decision = decide_after(settings, reported, renewed, deviations_by_model(every))
    limited, now = round.capped.reasons, time.time()
    round.round_file = RoundFile(
        round=number,
        facilities=[dataclasses.replace(row, reason=row.reason or limited.get(row.facility, "")) for row in rows],
        message=message,
        model_sha256=read_manifest(directory / "model").content_sha256,
        global_loss=losses[-1],
        global_loss_over=sorted(reported[-1]),
        later_losses=later_than(history, losses, reported),
        decision=decision.reason,
        ended=not decision.proceed and number + 1 < settings.rounds,
        broken=decision.broken,
        attempts=round.attempt,
        wait=read_wait(Path.cwd(), number) if settings.closing else None,
        outer_factor=round.watched.factor,
        guard=round.watched.reason,
        scores=round.arrived.scores,
        decay=round.decay,
        present=round.present,
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=seconds_of(archive.read_note(UNDER_WAY), number, now),
        changes=[*unrecorded_changes(archive), *rewind_remarks(archive, number)],
        aggregation=dataclasses.asdict(round.record),
    )
    found = asks_ahead(archive, settings, [*history, round.round_file], directory)
    write_released_steps([*rounds_set_aside(archive), *history, found], directory)
    write_rewinds(archive, round.model, directory / "model", directory / "message")
    round.round_file, round.decision, round.limited = within_limits(archive, settings, [*history, found], decision, now)
    write_json(directory / "round.json", dataclasses.asdict(round.round_file))


def keep_beside(round: Commit) -> None:
    """Keep what lies beside the round in the archive before the round appears: a commit that is killed in between is
    made again only while the round is not there."""
    archive, number, limited = round.archive, round.number, round.limited
    note_unreported(archive, number)
    late = {name: one.round for name, one in round.arrived.reports.items() if one.round < number}
    keep_updates(archive, round.settings, round.arrived.updates, round.left_out, model=round.model, late=late)
    if limited is not None:
        archive.write_note(LIMITED, {"after_round": number, "limit": limited.limit, "reason": limited.reason})


def clean_up(round: Commit) -> None:
    """Log the round that is now in the archive, note what follows, and remove what it makes superfluous."""
    archive, number = round.archive, round.number
    log_aggregated(round.round_file)
    archive.drop_note("attempts")
    drop_recorded_changes(archive)
    archive.write_note(UNDER_WAY, {"round": number + 1, "since": time.time(), "whole": True})
    archive.prune(round.settings.keep_rounds, also=best_round(round.losses) if round.settings.limits else None)
    behind = round.settings.aggregation.maximum_staleness
    sweep_round(Path.cwd(), round.record.federation, number, behind=behind)


def announce(round: Commit) -> None:
    """Report the round to the log, the supervisor and the experiment trackers."""
    if round.watched.reason:
        log.info(round.watched.reason)
    log.info("round %d is complete: %s", round.number, round.decision.reason)
    emit("complete", round=round.number, decision=round.decision.reason)
    feed_trackers(round.archive, round.settings, round.round_file)


def following(round: Commit) -> NextRound:
    """What comes after a round: the next one, the final evaluation, or the end with its reason."""
    archive, number, decision = round.archive, round.number, round.decision
    model = archive.model_for(number + 1)
    if decision.proceed:
        return NextRound(model, number + 1, proceed=True)
    if decision.broken:
        archive.write_note(
            "stopped",
            {"round": number, "reason": f"{decision.reason}; the models of earlier rounds are in {archive.path}"},
        )
        return NextRound(model, number + 1, proceed=False)
    if round.settings.final_evaluation:
        return NextRound(model, round.settings.rounds, proceed=True)
    return compare_next(archive, round.settings, model)
