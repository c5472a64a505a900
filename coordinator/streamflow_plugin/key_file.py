"""What the file of an ssh key holds, read without its passphrase."""

from __future__ import annotations

import base64
import binascii
import re
import struct
from dataclasses import dataclass
from pathlib import Path

MOST_BYTES = 1 << 16
OPENSSH = re.compile(rb"-----BEGIN OPENSSH PRIVATE KEY-----\s(.*?)-----END", re.DOTALL)
MAGIC = b"openssh-key-v1\0"
ENCRYPTED = (b"-----BEGIN ENCRYPTED PRIVATE KEY-----", b"Proc-Type: 4,ENCRYPTED")
"""Marks of the older formats."""
PUBLIC = re.compile(rb"(?:ssh|ecdsa|sk-ssh|sk-ecdsa)-[\w@.-]+ (AAAA[\w+/]+=*)")


@dataclass(frozen=True, kw_only=True)
class KeyFile:
    """One file."""

    public: bool = False
    """A public key or certificate, where a private key is expected."""
    encrypted: bool = False
    """It has a passphrase."""
    identities: tuple[bytes, ...] = ()
    """Public keys and certificates that ssh-agent may hold for it, as they go over the wire; none: not known."""


def read_key_file(path: str | Path) -> KeyFile:
    """The private key at `path`, with `<path>.pub` and `<path>-cert.pub` beside it. A file that cannot be read, or has
    another form, is an empty `KeyFile`."""
    place = Path(path).expanduser()
    text = _read(place)
    found = [match[1] for name in (f"{place}.pub", f"{place}-cert.pub") if (match := PUBLIC.match(_read(Path(name))))]
    beside = [base64.b64decode(word) for word in found if len(word) % 4 == 0]
    if PUBLIC.match(text):
        return KeyFile(public=True)
    cipher, own = _header(text)
    return KeyFile(
        encrypted=cipher not in (b"", b"none") or any(mark in text for mark in ENCRYPTED),
        identities=tuple(dict.fromkeys([*([own] if own else []), *beside])),
    )


def _header(text: bytes) -> tuple[bytes, bytes]:
    """Cipher and public key of OpenSSH's format, whose head is never encrypted; empty where it has another."""
    if (found := OPENSSH.search(text)) is None:
        return b"", b""
    try:
        raw = base64.b64decode(found[1])
        if not raw.startswith(MAGIC):
            return b"", b""
        cipher, at = _string(raw, len(MAGIC))
        _, at = _string(raw, at)  # key derivation
        _, at = _string(raw, at)  # its options
        return cipher, _string(raw, at + 4)[0]  # after the number of keys
    except (binascii.Error, struct.error):
        return b"", b""


def _string(raw: bytes, at: int) -> tuple[bytes, int]:
    """A string of ssh's wire format, and where it ends."""
    (length,) = struct.unpack_from(">I", raw, at)
    return raw[at + 4 : at + 4 + length], at + 4 + length


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES)
    except OSError:
        return b""
