"""`shares.json` of a masked update: the seeds of its masks, in shares sealed for each member of the roster.

A facility shares the seed of its own mask, and the seed that it has in common with each other member. After the
deadline every member opens what is for it: of a facility whose update arrived, the share of its own seed; of those that
left none, the shares of the seeds that the others have in common with them. K. Bonawitz et al., "Practical secure
aggregation for privacy-preserving machine learning", CCS 2017, figure 4, with two differences: the seeds of pairs are
shared instead of the key they come from, so that shares can travel with the update, and each seed has a commitment, so
that a wrong share is noticed and has a name.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from facility.exchange.errors import ManifestError
from facility.exchange.files.durable import write_json
from facility.exchange.messages.strict_json import Fields, read_message

NAME = "shares.json"
FORMAT = 1
MOST_BYTES = 4 << 20
MOST_MEMBERS = 255
OWN = ""
"""Stands for a facility's own seed where the others are named by the other facility."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What one facility shares with the others."""

    facility: str
    round: int
    roster: str
    """Digest."""
    commitments: dict[str, str]
    """sha256 by the other facility, or `OWN`."""
    sealed: dict[str, str]
    """For each member, sealed for it alone; hexadecimal."""
    format: int = FORMAT


def commit_to_seed(roster: str, facility: str, other: str, seed: bytes) -> str:
    """Binds a facility to a seed; says nothing of it."""
    return hashlib.sha256(f"crossfed seed\n{roster}\n{facility}\n{other}\n".encode() + seed).hexdigest()


def write_shares(directory: Path, shares: Shares) -> None:
    """Write a facility's shares into `directory`, atomically."""
    write_json(directory / NAME, dataclasses.asdict(shares))


def read_shares(path: Path) -> Shares:
    """Raises `ManifestError`."""
    found = read_message(path, Shares, newest=FORMAT, most_bytes=MOST_BYTES)
    return Shares(
        facility=found.text("facility"),
        round=found.whole("round"),
        roster=found.digest("roster"),
        commitments=parse_hex_texts(found, "commitments", 64, blank=True),
        sealed=parse_hex_texts(found, "sealed", 1 << 16),
        format=found.whole("format", least=1, most=FORMAT),
    )


def parse_hex_texts(found: Fields, name: str, longest: int, *, blank: bool = False) -> dict[str, str]:
    """A mapping of hexadecimal texts by facility; `blank`: `OWN` may be among the names."""
    raw = dict(found.raw.get(name) or {}) if isinstance(found.raw.get(name), dict) else {}
    own = raw.pop(OWN, None) if blank else None
    inside = Fields(raw=Fields(raw={name: raw}, where=found.where).mapping(name, MOST_MEMBERS), where=found.where)
    values = {one: inside.text(one, longest=longest) for one in raw}
    if own is not None:
        values[OWN] = Fields(raw={"own": own}, where=found.where).text("own", longest=longest)
    for value in values.values():
        if len(value) % 2 or any(letter not in "0123456789abcdef" for letter in value):
            raise ManifestError(f"{found.where}: {name} holds text that is not hexadecimal")
    return values


def check_members(shares: Shares, members: Mapping[str, object]) -> str:
    """Why shares do not cover a roster with these members, or ''."""
    others = {name for name in members if name != shares.facility}
    if set(shares.commitments) != {OWN, *others} or set(shares.sealed) != set(members):
        return "its shares are not for the members of the roster"
    return ""
