"""Answer a request to unmask: check it, note it durably, then open the shares that it asks for and no others."""

from __future__ import annotations

import logging
from pathlib import Path

from facility.exchange.errors import InputError
from facility.exchange.files.paths import resolve_path
from facility.exchange.masking.roster import Roster, check_size, read_roster
from facility.exchange.masking.shares import OWN, Shares, read_shares
from facility.exchange.masking.unmasking import (
    ROSTER,
    Answer,
    UnmaskRequest,
    asked_of,
    read_request,
    request_digest,
    shares_path,
)
from facility.exchange.masking.walks import check_walks
from facility.exchange.messages.masking import MaskingSettings
from facility.masking.ledger import AnswerLedger, Entry, weighing_of
from facility.masking.private_keys import PrivateKeys
from facility.masking.request_copy import private_copy
from facility.masking.sharing import open_share
from facility.masking.site_rules import SiteRules

log = logging.getLogger(__name__)


def answer_request(request: Path, *, facility: str, settings: MaskingSettings, state: Path, rules: SiteRules) -> Answer:
    """This facility's answer. Raises `InputError` where the request must not, or cannot, be answered."""
    rules.check(settings)
    with private_copy(request) as copy:
        return _answer(copy, facility=facility, settings=settings, state=state, least=rules.least(settings))


def _answer(request: Path, *, facility: str, settings: MaskingSettings, state: Path, least: int) -> Answer:
    asked = read_request(request)
    roster = read_roster(request / ROSTER, settings, resolve_path(settings.peer_signers))
    check_size(roster, settings, least)
    check_survivors(asked, roster, least)
    member = PrivateKeys(state=state).of(roster, facility)
    check_walks(roster, facility)
    sealed = [read_sealed(request, name, roster) for name in asked.survivors]
    digest = request_digest(request, asked, roster.digest)
    entry = Entry(
        run=roster.agreement.run,
        round=roster.agreement.round,
        base_sha256=roster.agreement.base_sha256,
        generation=roster.keys[facility].generation,
        request=digest,
        survivors=asked.survivors,
        weighing=weighing_of(roster, asked.survivors, settings),
    )
    AnswerLedger(state=state).record(entry)
    own: dict[str, str] = {}
    pairs: dict[str, dict[str, str]] = {}
    absent = asked_of(asked.survivors, roster.keys)
    for shares in sealed:
        try:
            opened = open_share(member, shares)
        except InputError as error:  # that facility's fault; the others are answered
            log.warning("%s", error)
            continue
        own[shares.facility] = opened[OWN].hex()
        pairs[shares.facility] = {name: opened[name].hex() for name in absent[shares.facility]}
    return Answer(
        federation=asked.federation, facility=facility, round=asked.round, request=digest, own=own, pairs=pairs
    )


def check_survivors(asked: UnmaskRequest, roster: Roster, least: int) -> None:
    """Raise `InputError` unless the sum is over `least` members of the roster or more."""
    agreement = roster.agreement
    if (asked.federation, asked.round) != (agreement.federation, agreement.round):
        raise InputError(f"the request is of round {asked.round} of {asked.federation!r}, its roster is not")
    if strangers := sorted(set(asked.survivors) - set(roster.keys)):
        raise InputError(f"the request names {strangers}, which the roster does not have")
    if len(asked.survivors) < least:
        raise InputError(
            f"the request is for a sum over {len(asked.survivors)} facilities, expected {least} or more "
            f"(threshold {agreement.threshold}, minimum_sum, or what this site demands)"
        )


def read_sealed(request: Path, name: str, roster: Roster) -> Shares:
    """The shares of one survivor. Raises `InputError` where they are another facility's or of another roster."""
    shares = read_shares(shares_path(request, name))
    if (shares.facility, shares.roster) != (name, roster.digest):
        raise InputError(
            f"the request has shares of {shares.facility!r} for {name!r}, or of another roster: they were used before"
        )
    return shares
