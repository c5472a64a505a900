"""A facility's private keys by generation, and the seeds and seals that follow from them.

Keys are of use only where they were drawn: a state directory that is restored from a backup has forgotten what was
answered under them, and would answer once more for another sum. So a file lies beside them that is never written again.
The time at which its inode changed last stands in each key, which cannot be set back (inode(7)): in a restored copy
it is the time of restoring.

X25519 (RFC 7748), HKDF-SHA256 (RFC 5869), AES-256-GCM. Salt and associated data hold the roster's digest: what was
sealed or masked under one roster means nothing under another.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from facility.exchange.core_dumps import leave_no_core
from facility.exchange.errors import InputError
from facility.exchange.files.durable import write_bytes
from facility.exchange.json_values import values_in
from facility.exchange.masking.roster import Roster

NONCE_BYTES = 12
KEY_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class PrivateKeys:
    """The private keys of one facility in one federation, below its state directory."""

    state: Path

    @property
    def directory(self) -> Path:
        return Path(self.state) / "masking" / "keys"

    @property
    def place(self) -> Path:
        """An empty file that says since when this directory is here."""
        return self.directory.with_name("place")

    def since(self) -> int | None:
        """When the state directory came to be here: seconds, as some file systems keep no more; None: not known."""
        try:
            return int(self.place.stat().st_ctime)
        except OSError:
            return None

    def draw(self, round: int) -> tuple[str, str]:
        """A new pair: its generation, and the public key.

        Pairs of rounds before the last are forgotten, and those of later ones, which `crossfed rewind` set aside.
        """
        leave_no_core()
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in self.directory.glob("*.json"):
            if self._round_of(path) not in (round - 1, round):
                path.unlink(missing_ok=True)
        if self.since() is None:
            write_bytes(self.place, b"", mode=0o600)
        generation, key = secrets.token_hex(32), X25519PrivateKey.generate()
        value = {"round": round, "private_key": key.private_bytes_raw().hex(), "since": self.since()}
        write_bytes(self.directory / f"{generation}.json", json.dumps(value).encode(), mode=0o600)
        return generation, key.public_key().public_bytes_raw().hex()

    def of(self, roster: Roster, facility: str) -> Member:
        """This facility as a member of a roster. Raises `InputError` where the roster holds keys that are not its."""
        own = roster.keys.get(facility)
        if own is None:
            raise InputError(
                f"the roster of round {roster.agreement.round} has no keys of {facility!r}: its step `keys` failed"
            )
        drawn = self._drawn(own.generation)
        if drawn is None or drawn[0].public_key().public_bytes_raw().hex() != own.public_key:
            raise InputError(
                f"the roster of round {roster.agreement.round} holds keys of {facility!r} that are not in "
                f"{self.directory}: they were used before, or CROSSFED_STATE differs between login node and jobs "
                "(set it in env.sh)"
            )
        private, since = drawn
        if since is None or since != self.since():
            raise InputError(
                f"{self.directory.parent} was restored or copied after {facility!r} drew its keys of round "
                f"{roster.agreement.round}: what was answered under them may be forgotten, so they are used no more; "
                "the next round draws keys anew"
            )
        return Member(facility=facility, roster=roster, key=private)

    def _round_of(self, path: Path) -> int | None:
        """Of a pair; None for a file that is damaged, and so of no use."""
        try:
            return int(values_in(path)["round"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _drawn(self, generation: str) -> tuple[X25519PrivateKey, int | None] | None:
        """A private key and `since` at its time; None where it is not here."""
        leave_no_core()
        try:
            value = values_in(self.directory / f"{generation}.json")
            return X25519PrivateKey.from_private_bytes(bytes.fromhex(value["private_key"])), value["since"]
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True, kw_only=True)
class Member:
    """One facility with its private key in one roster."""

    facility: str
    roster: Roster
    key: X25519PrivateKey

    def seed(self, other: str) -> bytes:
        """The seed that this facility has in common with another member, and with nobody else."""
        return self._derived(other, "\n".join(["crossfed mask", *sorted((self.facility, other))]))

    def seal(self, content: bytes, receiver: str) -> bytes:
        """`content` for a member alone."""
        nonce = os.urandom(NONCE_BYTES)
        context = self._context(self.facility, receiver)
        return nonce + AESGCM(self._derived(receiver, context)).encrypt(nonce, content, context.encode())

    def open(self, box: bytes, sender: str) -> bytes:
        """What a member sealed for this facility. Raises `InputError`."""
        context = self._context(sender, self.facility)
        try:
            return AESGCM(self._derived(sender, context)).decrypt(
                box[:NONCE_BYTES], box[NONCE_BYTES:], context.encode()
            )
        except (InvalidTag, ValueError):
            raise InputError(f"what {sender!r} sealed for {self.facility!r} cannot be opened") from None

    def _context(self, sender: str, receiver: str) -> str:
        return f"crossfed shares\n{self.roster.digest}\n{sender}\n{receiver}"

    def _derived(self, other: str, purpose: str) -> bytes:
        public = X25519PublicKey.from_public_bytes(bytes.fromhex(self.roster.keys[other].public_key))
        try:
            common = self.key.exchange(public)
        except ValueError:
            raise InputError(f"the public key of {other!r} is none (all keys give the same secret)") from None
        salt = bytes.fromhex(self.roster.digest)
        return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=purpose.encode()).derive(common)
