"""The roster of a round: who masks with whom, under which keys, and all else that must be equal at every facility.

    ROSTER/agreement.json          what the coordinator proposes: bits, threshold, clips, the model it is for
    ROSTER/keys/NAME/keys.json     a facility's public key of this round, and what it claims to count
    ROSTER/keys/NAME/manifest.json, manifest.json.sig

Each key is signed by its facility and checked by every other against signers that it holds itself, so the coordinator
cannot put its own keys in between. The digest of all of it, and of each reader's own settings of secure aggregation,
goes into every mask and every share: facilities that were shown different rosters, or were asked to weigh or to clip in
different ways, cannot be unmasked together.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from facility.exchange.errors import InputError, ManifestError
from facility.exchange.files import present
from facility.exchange.files.durable import write_json
from facility.exchange.masking.weights import scale_weights
from facility.exchange.messages.manifest import NAME, Manifest, read_manifest, run_of, verify_manifest, write_manifest
from facility.exchange.messages.masking import MaskingSettings
from facility.exchange.messages.plausible import MOST_ROUNDS
from facility.exchange.messages.signatures import sign_manifest, verify_signature
from facility.exchange.messages.strict_json import HEX, Fields, read_json, read_message

FORMAT, KEYS_FORMAT = 1, 2
"""Of the agreement, and of keys: 2 says steps."""
KIND = "keys"
KEYS = "keys.json"
FOLDER = "keys"
AGREEMENT = "agreement.json"
TOLD = "told"
"""In the `extra` of a keys' manifest, which facilities of earlier versions leave out and do not read: `Keys.told`."""
MOST_BYTES = 8 << 20
MOST_TENSORS = 40_000
MOST_CLAIM = 10**15


@dataclass(frozen=True, kw_only=True)
class Keys:
    """One facility's part of a roster."""

    federation: str
    facility: str
    round: int
    generation: str
    """Names this pair of keys at its facility; drawn anew each time that keys are asked for."""
    public_key: str
    """X25519, hexadecimal."""
    steps: int
    """Optimizer steps that it takes in this round."""
    samples: int
    """Sequences that it trains on: those of all its steps."""
    tokens: int
    """Those times the length of its blocks."""
    walk: str
    """Digest of what it was asked for that decides how far it trains (`walks.walk_of`)."""
    told: str = ""
    """Digest of what else decides which update it makes of a model (`walks.decisive_digest`); '': not said."""
    format: int = KEYS_FORMAT


def write_keys(directory: Path, keys: Keys, signing_key: Path) -> None:
    """Write and sign a facility's keys into an empty directory."""
    value = dataclasses.asdict(keys)
    extra = {TOLD: told} if (told := value.pop("told")) else {}
    write_json(directory / KEYS, value)
    manifest = Manifest(kind=KIND, federation=keys.federation, facility=keys.facility, round=keys.round, extra=extra)
    write_manifest(directory, manifest)
    sign_manifest(directory, signing_key, kind=KIND, of=(keys.federation, keys.round))


def read_keys(directory: Path, signers: Path) -> tuple[Keys, str]:
    """Keys whose signature is that of the facility they name, and the fingerprint of the key that signed.

    Raises `ManifestError`.
    """
    manifest = verify_manifest(directory)
    if manifest.kind != KIND or manifest.facility is None or set(manifest.files) != {KEYS}:
        raise ManifestError(f"{directory} holds a {manifest.kind!r}, expected a facility's keys")
    signer = verify_signature(directory, manifest.facility, signers)
    path = directory / KEYS
    found = (
        Fields(raw=read_json(path, most_bytes=64_000), where=str(path))
        .of_format(KEYS_FORMAT)
        .only({one.name for one in dataclasses.fields(Keys)} - {"told"})
    )
    extra = Fields(raw=manifest.extra, where=str(directory / NAME))
    keys = Keys(
        federation=found.text("federation"),
        facility=found.text("facility"),
        round=found.whole("round", most=MOST_ROUNDS),
        generation=_hex(found, "generation"),
        public_key=_hex(found, "public_key"),
        steps=found.whole("steps", least=1, most=MOST_CLAIM),
        samples=found.whole("samples", least=1, most=MOST_CLAIM),
        tokens=found.whole("tokens", least=1, most=MOST_CLAIM),
        walk=_hex(found, "walk"),
        told=_hex(extra, TOLD) if TOLD in manifest.extra else "",
        format=found.whole("format", least=KEYS_FORMAT, most=KEYS_FORMAT),
    )
    if (keys.facility, keys.federation, keys.round) != (manifest.facility, manifest.federation, manifest.round):
        raise ManifestError(f"{path} and its manifest name different facilities, federations or rounds")
    try:  # with a point of small order everybody's secret is the same, and the others' jobs would fail over it
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(keys.public_key)))
    except ValueError:
        raise ManifestError(f"the public key of {keys.facility!r} is none: all keys give the same secret") from None
    return keys, signer


def check_signers(signers: Mapping[str, str]) -> None:
    """Raise `ManifestError` where two facilities sign with one key: whoever holds it knows two updates of a sum.

    `signers`: fingerprints by facility.
    """
    by_key: dict[str, str] = {}
    for name, key in sorted(signers.items()):
        if key and (other := by_key.setdefault(key, name)) != name:
            raise ManifestError(
                f"{other!r} and {name!r} sign with one key ({key}): to secure aggregation they are one facility, which "
                "would take part twice; give each a key of its own"
            )


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What a roster says besides keys."""

    federation: str
    run: str
    round: int
    base_sha256: str
    """Of the model that the round starts from."""
    bits: int
    threshold: int
    """Facilities that must answer for the masks to come off."""
    default_clip: float
    """Clip of tensors that `clips` does not name."""
    clips: dict[str, float] = field(default_factory=dict)
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Roster:
    """A roster, read and checked."""

    agreement: Agreement
    keys: dict[str, Keys]
    """Each facility's keys, sorted by name."""
    digest: str
    """Of all of it, and of what the settings of secure aggregation have in common everywhere."""

    @property
    def members(self) -> list[str]:
        return sorted(self.keys)

    def point(self, facility: str) -> int:
        """Number of a member's shares, from 1."""
        return self.members.index(facility) + 1

    def weights(self, kind: str, maximum_share: float) -> dict[str, float]:
        """What each member counts; the largest weight is 1."""
        claims = {name: 1.0 if kind == "equal" else float(getattr(one, kind)) for name, one in self.keys.items()}
        return scale_weights(claims, maximum_share if len(claims) >= 3 else 1.0)


def write_roster(directory: Path, agreement: Agreement, keys: Mapping[str, Path]) -> None:
    """Write a roster into an empty directory from the directories of its members' keys."""
    write_json(directory / AGREEMENT, dataclasses.asdict(agreement))
    (directory / FOLDER).mkdir()
    for name, source in sorted(keys.items()):
        target = directory / FOLDER / name
        target.mkdir()
        for path in sorted(source.iterdir()):
            (target / path.name).write_bytes(path.read_bytes())


def read_roster(directory: Path, settings: MaskingSettings, signers: Path) -> Roster:
    """Raises `ManifestError` unless every key is signed by one of the federation's facilities and all fits `settings`.

    `signers`: the reader's own allowed-signers file.
    """
    agreement = read_agreement(directory)
    keys: dict[str, Keys] = {}
    digests: dict[str, str] = {}
    signed_with: dict[str, str] = {}
    for path in sorted((directory / FOLDER).iterdir()) if present.is_dir(directory / FOLDER) else []:
        one, signed_with[path.name] = read_keys(path, signers)
        if one.facility != path.name or one.facility not in settings.facilities:
            raise ManifestError(f"{path} holds the keys of {one.facility!r}, expected one of {settings.facilities}")
        if (one.federation, one.round) != (agreement.federation, agreement.round):
            raise ManifestError(
                f"the keys of {one.facility!r} are of round {one.round} of {one.federation!r}, expected round "
                f"{agreement.round} of {agreement.federation!r}: they were used before"
            )
        keys[one.facility] = one
        digests[one.facility] = hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
    check_signers(signed_with)
    if len({one.public_key for one in keys.values()}) < len(keys):
        raise ManifestError(f"{directory} has one key for two facilities")
    found = (agreement.bits, agreement.threshold)
    if found != (settings.bits, settings.threshold):
        raise ManifestError(
            f"{directory} asks for {found[0]} bits and threshold {found[1]}, the settings say {settings.bits} and "
            f"{settings.threshold}"
        )
    every = {"agreement": dataclasses.asdict(agreement), "keys": digests, "settings": settings.common}
    text = json.dumps(every, sort_keys=True)
    return Roster(agreement=agreement, keys=keys, digest=hashlib.sha256(text.encode()).hexdigest())


def check_size(roster: Roster, settings: MaskingSettings, least: int) -> None:
    """Raise `InputError` where so few facilities take part that no sum of `least` updates could be unmasked."""
    if len(roster.keys) < least:
        absent = ", ".join(sorted(set(settings.facilities) - set(roster.keys)))
        raise InputError(
            f"{len(roster.keys)} facilities have keys for round {roster.agreement.round}, secure aggregation needs "
            f"{least}; without keys: {absent}"
        )


def read_agreement(directory: Path) -> Agreement:
    """Raises `ManifestError`."""
    path = directory / AGREEMENT
    found = read_message(path, Agreement, newest=FORMAT, most_bytes=MOST_BYTES)
    clips = found.inside("clips", MOST_TENSORS)
    agreement = Agreement(
        federation=found.text("federation"),
        run=found.text("run", ""),
        round=found.whole("round", most=MOST_ROUNDS),
        base_sha256=found.digest("base_sha256"),
        bits=found.whole("bits", least=16, most=32),
        threshold=found.whole("threshold", least=2, most=255),
        default_clip=found.number("default_clip", most=1e6),
        clips={name: clips.number(name, most=1e6) for name in clips.raw},
        format=found.whole("format", least=1, most=FORMAT),
    )
    if min([agreement.default_clip, *agreement.clips.values()]) <= 0:
        raise ManifestError(f"{path} has a clip of 0: nothing could be sent")
    return agreement


def base_of(model: Path) -> tuple[str, str, int]:
    """Run, digest and round of a received model."""
    manifest = read_manifest(model)
    return run_of(manifest), manifest.content_sha256, manifest.round


def _hex(found: Fields, name: str) -> str:
    value = found.text(name)
    if not HEX.fullmatch(value):
        raise ManifestError(f"{found.where}: {name} is not a number of 64 hexadecimal digits")
    return value
