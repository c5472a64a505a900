"""A checksum of what stays at a facility: under a key that lies beside it, at twenty times the speed of sha256.

AES-256-GMAC (NIST SP 800-38D) with a key drawn for each file. Whatever happens to a file without regard to the key is
noticed, but for a share of (bytes / 16 + 1) / 2^128. Whoever reads the key can make another file with the same
checksum: where a digest stands for content between parties, in manifests and signatures, it is sha256.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

PREFIX = "aes-256-gmac"
KEY_BYTES = 32
NONCE = bytes(12)
"""The same always: no key serves for two files."""
READ_BYTES = 1 << 20


class Digest(Protocol):
    """What hashes the bytes of a file in their order."""

    def update(self, content: Any, /) -> object: ...

    def hexdigest(self) -> str: ...


class KeyedChecksum:
    """Of bytes in their order, like a digest of hashlib. `key`: 32 bytes; None: drawn."""

    def __init__(self, key: bytes | None = None) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher  # as in masking/streams.py: 6 MB
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import GCM

        self._key = os.urandom(KEY_BYTES) if key is None else key
        self._cipher = Cipher(AES(self._key), GCM(NONCE)).encryptor()
        self._done = ""

    def update(self, content: bytes | bytearray | memoryview) -> None:
        self._cipher.authenticate_additional_data(content)

    def hexdigest(self) -> str:
        """`aes-256-gmac:KEY:TAG`, both hexadecimal. Nothing can be added after it."""
        if not self._done:
            self._cipher.finalize()
            self._done = f"{PREFIX}:{self._key.hex()}:{self._cipher.tag.hex()}"
        return self._done


def is_checksum(stated: str) -> bool:
    """Whether it is one of `KeyedChecksum`, rather than a sha256."""
    return stated.startswith(f"{PREFIX}:")


def matches(path: Path, stated: str) -> bool:
    """Whether the file has this checksum. Raises `ValueError` where it is none."""
    _, key, tag = stated.split(":")
    if len(key) != 2 * KEY_BYTES or not tag:
        raise ValueError(f"{stated:.80} is no checksum")
    made, buffer = KeyedChecksum(bytes.fromhex(key)), memoryview(bytearray(READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            made.update(buffer[:count])
    return made.hexdigest() == stated
