"""A round of masked updates: which of them are summed, and how the masks come off the sum.

There are two steps, with the facilities' answers between them. What the first decides is final, so it also decides
whether the round is repeated for a facility's sake. The rest is as in `coordinator.steps.aggregate`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from coordinator.aggregation.unmasking import Unmasking
from coordinator.config.settings import CoordinatorSettings
from coordinator.masking.pending import Pending, write_request_directory
from coordinator.masking.reconstruct import Seeds, reconstruct
from coordinator.masking.rosters import open_roster, settings_of
from coordinator.steps.arrived import Arrived, CollectedRound, drop
from coordinator.steps.commit import commit
from coordinator.steps.incomplete import ask_again, give_up, too_few
from coordinator.steps.next_round import NextRound
from facility.exchange.errors import CrossFedError, InputError
from facility.exchange.files.links import link_tree
from facility.exchange.files.paths import resolve_path
from facility.exchange.masking.roster import Roster
from facility.exchange.masking.shares import NAME as SHARES_FILE
from facility.exchange.masking.shares import check_members, read_shares
from facility.exchange.masking.unmasking import (
    ROSTER,
    Answer,
    UnmaskRequest,
    read_answer,
    read_request,
    request_digest,
    shares_path,
)
from facility.exchange.messages.masking import MaskingSettings
from facility.exchange.messages.report import read_failure, read_report
from facility.exchange.messages.strict_json import clean_text

log = logging.getLogger(__name__)


def settle(round: CollectedRound, *, roster: Path, out: Path) -> UnmaskRequest:
    """Write to `out` what the facilities are asked for.

    A request that is pending stays as it is, unless the settings were changed since and nobody would answer it:
    facilities that have answered it refuse another one themselves.
    """
    settings, number = round.settings, round.number
    pending = Pending(archive=round.archive, round=number)
    there = number < settings.rounds and pending.find(round.model)
    if there and (reason := outdated(pending, settings)):
        log.warning("round %d: the sum is asked for anew, the settings were changed since: %s", number, reason)
        pending.forget()
    elif there:
        link_tree(pending.request, out)
        return read_request(out)
    nothing = UnmaskRequest(federation=settings.federation, round=number, survivors=[])
    request = nothing
    if number < settings.rounds:
        round = without_misfits(round, roster)
        if ask_again(round):
            request = dataclasses.replace(nothing, again=True)
        elif len(round.arrived.updates) >= least_of(settings):
            request = dataclasses.replace(nothing, survivors=sorted(round.arrived.updates))
            pending.write(request, roster, round.arrived.updates)
    write_request_directory(out, request, roster, round.arrived.updates)
    return request


def outdated(pending: Pending, settings: CoordinatorSettings) -> str:
    """Why a pending request cannot be answered under these settings, which its facilities have as well; '': it can."""
    try:
        asked, roster = read_request(pending.request), open_roster(pending.request / ROSTER, settings)
    except CrossFedError as error:
        return clean_text(str(error), 300)
    reasons = [f"{name}: {why}" for name in asked.survivors if (why := misfit(pending.update(name), name, roster))]
    few = len(asked.survivors) < least_of(settings)
    return "; ".join(reasons) or ("it is of fewer facilities than may be summed now" if few else "")


def least_of(settings: CoordinatorSettings) -> int:
    """Updates without which there is no sum."""
    masking = settings_of(settings)
    return max(masking.threshold, masking.minimum_sum, settings.minimum_facilities)


def without_misfits(round: CollectedRound, roster: Path) -> CollectedRound:
    """The round with the updates that are masked under this roster; the others are their facilities' failures."""
    opened = open_roster(roster, round.settings)
    for name, update in round.arrived.updates.items():
        if reason := misfit(update, name, opened):
            round = round.without(name, reason)
    return round


def misfit(update: Path, name: str, roster: Roster) -> str:
    """Why a masked update cannot be part of the sum, or ''."""
    try:
        shares = read_shares(update / SHARES_FILE)
    except CrossFedError as error:
        return str(error)
    if name not in roster.keys:
        return "it has no keys in the roster of the round"
    if (shares.facility, shares.roster) != (name, roster.digest):
        return "it is masked under another roster, or its shares are another facility's: they were used before"
    return check_members(shares, roster.keys)


def close_masked_round(round: CollectedRound, *, request: Path, answers: Sequence[Path]) -> NextRound:
    """Model, number of the next round, and whether there is one."""
    settings, number, asked = round.settings, round.number, read_request(request)
    if asked.again:
        return NextRound(round.model, number, proceed=True)
    round = without_misfits(round, request / ROSTER)
    if not asked.survivors:
        return too_few(round, least=least_of(settings))
    pending, roster = Pending(archive=round.archive, round=number), open_roster(request / ROSTER, settings)
    round = dataclasses.replace(round, arrived=survivors_of(pending, asked, round.arrived))
    found, unread = read_answers(answers, settings, roster, request_digest(request, asked, roster.digest))
    for reason in unread:
        log.warning("round %d: no answer: %s", number, reason)
    try:
        shares = {name: read_shares(shares_path(request, name)) for name in asked.survivors}
        seeds = reconstruct(roster, shares, found)
    except InputError as error:
        reason = f"round {number} cannot be unmasked: {clean_text(str(error))}"
        if unread:
            reason += f" ({'; '.join(unread)})"
        return give_up(round, reason)
    for name, lie in seeds.liars.items():
        log.warning("round %d: of the answer of %s a share is left out: %s", number, name, lie)
    masking = settings_of(settings)
    closed = commit(round, unmasking_of(masking, roster, asked.survivors, seeds, answered=found, round=number))
    pending.drop()
    return closed


def unmasking_of(
    masking: MaskingSettings,
    roster: Roster,
    survivors: Sequence[str],
    seeds: Seeds,
    *,
    answered: Collection[str],
    round: int,
) -> Unmasking:
    """What takes the masks off the sum of the survivors' updates, and what the round's record says of it."""
    return Unmasking(
        bits=masking.bits,
        weights=roster.weights(masking.weights, masking.maximum_share),
        survivors=survivors,
        seeds=seeds.streams,
        clips=roster.agreement.clips,
        default_clip=roster.agreement.default_clip,
        moments=masking.moments_due(round),
        details={
            "masking": {
                "bits": masking.bits,
                "threshold": masking.threshold,
                "minimum_sum": masking.minimum_sum,
                "clip_norm": masking.clip_norm,
                "roster": roster.members,
                "survivors": survivors,
                "answered": sorted(answered),
                "wrong_answers": seeds.liars,
            }
        },
    )


def survivors_of(pending: Pending, asked: UnmaskRequest, arrived: Arrived) -> Arrived:
    """What the request is for, whatever has arrived since; all others are failures."""
    updates = {name: pending.update(name) for name in asked.survivors}
    failures = {name: failure for name, failure in arrived.failures.items() if name not in updates}
    late = Arrived(updates=arrived.updates, reports=arrived.reports, failures=failures)
    for name in sorted(set(arrived.updates) - set(updates)):
        late = drop(late, name, asked.round, "it came after the sum of the round was settled")
    return dataclasses.replace(
        arrived,
        updates=updates,
        reports={name: read_report(path) for name, path in updates.items()},
        failures=late.failures,
        dropped_updates=late.dropped_updates,
        dropped_reports=late.dropped_reports,
    )


def read_answers(
    directories: Sequence[Path], settings: CoordinatorSettings, roster: Roster, request: str
) -> tuple[dict[str, Answer], list[str]]:
    """The answers to this request by facility, and why others do not count."""
    found: dict[str, Answer] = {}
    unread: list[str] = []
    for directory in directories:
        try:
            if (failure := read_failure(directory)) is not None:
                raise InputError(f"{failure.facility}: {failure.reason}")
            answer = read_answer(directory, resolve_path(settings.aggregation.allowed_signers))
            if answer.facility not in roster.keys:
                raise InputError(f"an answer of {answer.facility!r}, which has no keys in this round's roster")
            if answer.request != request:
                raise InputError(
                    f"{answer.facility} answers the request {answer.request:.12}, expected {request:.12}: an answer of "
                    "an earlier request, or one that was made up"
                )
            found[answer.facility] = answer
        except (CrossFedError, OSError) as error:
            unread.append(clean_text(str(error), 300))
    return found, unread
