"""What is asked of the facilities once the updates are there, and what they answer.

REQUEST/request.json         the facilities whose updates arrived
REQUEST/roster/              the roster of the round
REQUEST/shares/NAME.json     their shares, sealed

ANSWER/answer.json           a share of each of their seeds, and of each seed that one of them has with an absent
ANSWER/manifest.json, manifest.json.sig
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from facility.exchange.errors import ManifestError
from facility.exchange.files.durable import write_json
from facility.exchange.masking.shares import MOST_MEMBERS, parse_hex_texts
from facility.exchange.messages.manifest import Manifest, verify_manifest, write_manifest
from facility.exchange.messages.signatures import sign_manifest, verify_signature
from facility.exchange.messages.strict_json import Fields, read_message

FORMAT = 1
REQUEST = "request.json"
ROSTER = "roster"
SHARES = "shares"
ANSWER = "answer.json"
KIND = "unmasking"
MOST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class UnmaskRequest:
    """Whose updates are to be summed. No survivors: nothing is asked for."""

    federation: str
    round: int
    survivors: list[str]
    """Sorted."""
    again: bool = False
    """The coordinator has decided to repeat the round."""
    format: int = FORMAT


def write_request(directory: Path, request: UnmaskRequest) -> None:
    """Write the request to unmask a sum into `directory`, atomically."""
    write_json(directory / REQUEST, dataclasses.asdict(request))


def read_request(directory: Path) -> UnmaskRequest:
    """Raises `ManifestError`."""
    path = directory / REQUEST
    found = read_message(path, UnmaskRequest, newest=FORMAT, most_bytes=MOST_BYTES)
    survivors = found.items("survivors", MOST_MEMBERS, Fields.text)
    if survivors != sorted(set(survivors)):
        raise ManifestError(f"{path} names its survivors twice or out of order")
    return UnmaskRequest(
        federation=found.text("federation"),
        round=found.whole("round"),
        survivors=survivors,
        again=found.flag("again", False),
        format=found.whole("format", least=1, most=FORMAT),
    )


def request_digest(directory: Path, request: UnmaskRequest, roster: str) -> str:
    """Digest of survivors, roster and every sealed share: two requests with one digest ask for the same."""
    digest = hashlib.sha256(roster.encode())
    for name in request.survivors:
        digest.update(f"\n{name} ".encode() + hashlib.sha256(shares_path(directory, name).read_bytes()).digest())
    return digest.hexdigest()


def shares_path(directory: Path, facility: str) -> Path:
    """Where a request holds the shares of one facility."""
    return directory / SHARES / f"{facility}.json"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One facility's shares. A survivor whose shares could not be opened is absent."""

    federation: str
    facility: str
    round: int
    request: str
    """Digest of what is answered."""
    own: dict[str, str]
    """By survivor: a share of the seed of its own mask; hexadecimal."""
    pairs: dict[str, dict[str, str]]
    """By survivor, then by absent facility: a share of the seed that the two have in common."""
    format: int = FORMAT


def write_answer(directory: Path, answer: Answer, signing_key: Path) -> None:
    """Write and sign an answer into an empty directory."""
    write_json(directory / ANSWER, dataclasses.asdict(answer))
    manifest = Manifest(kind=KIND, federation=answer.federation, facility=answer.facility, round=answer.round)
    write_manifest(directory, manifest)
    sign_manifest(directory, signing_key, kind=KIND, of=(answer.federation, answer.round))


def read_answer(directory: Path, signers: Path) -> Answer:
    """An answer whose signature is that of the facility it names. Raises `ManifestError`."""
    manifest = verify_manifest(directory)
    if manifest.kind != KIND or manifest.facility is None:
        raise ManifestError(f"{directory} holds a {manifest.kind!r}, expected a facility's answer")
    verify_signature(directory, manifest.facility, signers)
    path = directory / ANSWER
    found = read_message(path, Answer, newest=FORMAT, most_bytes=4 * MOST_BYTES)
    pairs = Fields(raw=found.mapping("pairs", MOST_MEMBERS), where=str(path))
    answer = Answer(
        federation=found.text("federation"),
        facility=found.text("facility"),
        round=found.whole("round"),
        request=found.digest("request"),
        own=parse_hex_texts(found, "own", 64),
        pairs={name: parse_hex_texts(pairs, name, 64) for name in pairs.raw},
        format=found.whole("format", least=1, most=FORMAT),
    )
    if (answer.facility, answer.federation, answer.round) != (manifest.facility, manifest.federation, manifest.round):
        raise ManifestError(f"{path} and its manifest name different facilities, federations or rounds")
    return answer


def asked_of(survivors: list[str], members: Mapping[str, object]) -> dict[str, list[str]]:
    """By survivor, the absent members whose common seeds are wanted."""
    absent = sorted(set(members) - set(survivors))
    return {name: absent for name in survivors}
