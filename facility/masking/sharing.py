"""The seeds of a facility's masks in shares, sealed for each member; and what a member opens of them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from facility.exchange.errors import InputError
from facility.exchange.masking.shamir import split_secret
from facility.exchange.masking.shares import OWN, Shares, commit_to_seed, parse_hex_texts
from facility.exchange.masking.streams import SEED_BYTES
from facility.exchange.messages.strict_json import Fields, parse_json
from facility.masking.private_keys import Member


def share_seeds(member: Member, own: bytes) -> Shares:
    """`own`, the seed of this facility's own mask, and the seeds that it has in common with the others."""
    roster, members = member.roster, member.roster.members
    seeds = {OWN: own} | {other: member.seed(other) for other in members if other != member.facility}
    threshold = roster.agreement.threshold
    split_seeds = {name: split_secret(seed, count=len(members), threshold=threshold) for name, seed in seeds.items()}
    sealed = {}
    for place, receiver in enumerate(members):
        content = {name: shares[place].hex() for name, shares in split_seeds.items()}
        sealed[receiver] = member.seal(json.dumps(content).encode(), receiver).hex()
    return Shares(
        facility=member.facility,
        round=roster.agreement.round,
        roster=roster.digest,
        commitments={name: commit_to_seed(roster.digest, member.facility, name, seed) for name, seed in seeds.items()},
        sealed=sealed,
    )


def open_share(member: Member, shares: Shares) -> Mapping[str, bytes]:
    """This facility's share of each seed of another. Raises `InputError` with the other's name."""
    if shares.roster != member.roster.digest:
        raise InputError(f"the shares of {shares.facility!r} are of another roster: they were used before")
    content = member.open(bytes.fromhex(shares.sealed.get(member.facility, "")), shares.facility)
    where = f"the shares of {shares.facility!r}"
    read = parse_json(content.decode(errors="replace"), where=where)
    found = parse_hex_texts(Fields(raw={"seeds": read}, where=where), "seeds", 2 * SEED_BYTES, blank=True)
    if set(found) != {OWN, *(name for name in member.roster.members if name != shares.facility)}:
        raise InputError(f"the shares of {shares.facility!r} are not for the members of the roster")
    opened = {name: bytes.fromhex(value) for name, value in found.items()}
    if any(len(value) != SEED_BYTES for value in opened.values()):
        raise InputError(f"the shares of {shares.facility!r} have the wrong length")
    return opened
