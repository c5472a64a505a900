"""What the ranks of several nodes leave at the job's store, sealed: whoever knows its port lists, reads and sets all.

`list_keys` of torch's TCPStore names every key to every process that connects, so no name in it is a secret. Here names
are HMACs and values are encrypted and authenticated under a key that follows from the job's secret. A value is sealed
alike each time (the nonce is an HMAC of name and value, as in SIV mode: Rogaway and Shrimpton 2006, EUROCRYPT), so that
`compare_set` compares. Another process can delete or spoil an entry, which ends the job, and learns or forges none.
Counters (`add`) stay numbers: with them nobody is admitted and nothing is told.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import timedelta

import torch.distributed as dist
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from facility.exchange.errors import TransientError

NONCE_BYTES = 12


class SealedStore(dist.Store):
    """Entries of `store` that are of use with `key` alone, 32 bytes."""

    def __init__(self, store: dist.Store, key: bytes) -> None:
        super().__init__()
        self.store, self.key = store, key
        self.box = AESGCM(key)
        _ALIVE.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        self.store.set(self._name(key), self._sealed(key, value))

    def get(self, key: str) -> bytes:
        return self._opened(key, self.store.get(self._name(key)))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected = self._sealed(key, expected_value) if expected_value else ""
        found = self.store.compare_set(self._name(key), expected, self._sealed(key, desired_value))
        return self._opened(key, found) if found else b""

    def add(self, key: str, amount: int) -> int:
        return self.store.add(self._name(key), amount)

    def delete_key(self, key: str) -> bool:
        return self.store.delete_key(self._name(key))

    deleteKey = delete_key  # by this name a store in Python is asked from C++

    def check(self, keys: list[str]) -> bool:
        return self.store.check([self._name(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        names = [self._name(key) for key in keys]
        if timeout is None:
            self.store.wait(names)
        else:
            self.store.wait(names, timeout)

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> SealedStore:
        return SealedStore(self.store.clone(), self.key)  # type: ignore[attr-defined]

    def _name(self, key: str) -> str:
        return hmac.new(self.key, b"name " + key.encode(), hashlib.sha256).hexdigest()

    def _sealed(self, key: str, value: str | bytes) -> str:
        plain = value.encode() if isinstance(value, str) else bytes(value)
        name = self._name(key).encode()
        nonce = hmac.new(self.key, b"nonce " + name + plain, hashlib.sha256).digest()[:NONCE_BYTES]
        return (nonce + self.box.encrypt(nonce, plain, name)).hex()

    def _opened(self, key: str, sealed: bytes) -> bytes:
        try:
            raw = bytes.fromhex(sealed.decode())
            return self.box.decrypt(raw[:NONCE_BYTES], raw[NONCE_BYTES:], self._name(key).encode())
        except (ValueError, InvalidTag):
            raise TransientError(f"another process has put something in place of {key!r} at the job's store") from None


_ALIVE: list[SealedStore] = []
"""What torch holds in C++ alone would lose its Python half."""
