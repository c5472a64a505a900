"""Randomness unknown outside this process: it samples the units and makes the noise of their sum.

The federation's seed is public, and noise that is known can be subtracted. So a key is drawn from the operating
system (`os.urandom`) by every process at every start, and AES-256 in counter mode makes the bits of it. The generators
of torch and NumPy are not made to resist prediction. Normal values are made in float64 by the
transform of G. Box and M. Muller (1958). They are not exact in their last bits (I. Mironov, "On significance of the
least significant bits for differential privacy", CCS 2012): as with all of DP-SGD's implementations, the guarantee is
one about real numbers.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from facility.exchange.core_dumps import leave_no_core

PIECE = 1 << 20
"""Values made at once."""


class SecretRandom:
    """A stream of its own for every start of every process."""

    def __init__(self, key: bytes | None = None) -> None:
        """`key`: 32 bytes, for tests alone; None: of the operating system."""
        leave_no_core()
        self._stream = Cipher(AES(key or os.urandom(32)), CTR(bytes(16))).encryptor()

    def uniform(self, count: int) -> np.ndarray:
        """Float64 values in (0, 1)."""
        bits = np.frombuffer(self._stream.update(bytes(8 * count)), dtype="<u8") >> np.uint64(11)
        return (bits.astype(np.float64) + 0.5) * 2.0**-53

    def seed(self) -> int:
        """A seed for a generator of another kind, in [0, 2**63)."""
        return int.from_bytes(self._stream.update(bytes(8)), "little") >> 1

    def normal(self, count: int) -> np.ndarray:
        """Float64 values of the standard normal distribution."""
        half = -(-count // 2)
        radius = np.sqrt(-2.0 * np.log(self.uniform(half)))
        angle = 2.0 * np.pi * self.uniform(half)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]

    def chosen(self, count: int, rate: float) -> np.ndarray:
        """Which of `count` units a Poisson sample holds: each with probability `rate`, whatever the others do."""
        return np.flatnonzero(self.uniform(count) < rate)

    def add_normal(self, tensor: torch.Tensor, deviation: float) -> None:
        """Add noise of a standard deviation to every value, in place."""
        flat = tensor.view(-1)
        for begin in range(0, len(flat), PIECE):
            piece = flat[begin : begin + PIECE]
            noise = torch.from_numpy(self.normal(len(piece)) * deviation).to(piece.device)
            piece.copy_(piece.double() + noise)
