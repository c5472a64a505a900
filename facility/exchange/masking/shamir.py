"""Secret sharing: any `threshold` shares give the secret, fewer say nothing of it.

A. Shamir, "How to share a secret", Communications of the ACM 22 (1979), byte by byte over GF(2^8) with AES's
polynomial x^8 + x^4 + x^3 + x + 1; the secret is the polynomial's value at 0, share i its value at i.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import numpy as np

from facility.exchange.checkpoints.floats import Array
from facility.exchange.errors import InputError

MOST = 255
"""Shares of one secret."""


def _tables() -> tuple[Array, Array]:
    """Powers of the generator 3, twice in a row, and their logarithms."""
    powers, logarithms = np.zeros(510, np.uint8), np.zeros(256, np.int64)
    value = 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logarithms[value] = exponent
        doubled = (value << 1) ^ (0x11B if value & 0x80 else 0)
        value ^= doubled
    return powers, logarithms


POWERS, LOGARITHMS = _tables()


def times(values: Array, factor: int) -> Array:
    """Product of each byte and one byte."""
    if factor == 0:
        return np.zeros_like(values)
    return np.where(values == 0, 0, POWERS[LOGARITHMS[values] + LOGARITHMS[factor]]).astype(np.uint8)


def _quotient(numerator: int, denominator: int) -> int:
    return 0 if numerator == 0 else int(POWERS[(LOGARITHMS[numerator] - LOGARITHMS[denominator]) % 255])


def split_secret(secret: bytes, *, count: int, threshold: int) -> list[bytes]:
    """`count` shares of `secret`; number i (from 0) is the polynomials' value at i + 1."""
    assert 1 <= threshold <= count <= MOST, (threshold, count)
    drawn = [np.frombuffer(secrets.token_bytes(len(secret)), np.uint8) for _ in range(threshold - 1)]
    return [bytes(_value([np.frombuffer(secret, np.uint8), *drawn], point)) for point in range(1, count + 1)]


def _value(coefficients: list[Array], point: int) -> Array:
    """Values of polynomials at `point`; coefficients lowest first (Horner's rule)."""
    total = np.zeros_like(coefficients[0])
    for coefficient in reversed(coefficients):
        total = times(total, point) ^ coefficient
    return total


def interpolate(shares: Mapping[int, bytes], at: int = 0) -> bytes:
    """The value at `at` of the polynomials through `shares`, by their points (from 1). Raises `InputError`."""
    if len({len(share) for share in shares.values()}) != 1:
        raise InputError("shares of one secret have different lengths, or there is none")
    total = np.zeros(len(next(iter(shares.values()))), np.uint8)
    for point, share in shares.items():
        factor = 1
        for other in shares:
            if other != point:
                step = _quotient(at ^ other, point ^ other)
                factor = int(times(np.array([factor], np.uint8), step)[0])
        total ^= times(np.frombuffer(share, np.uint8), factor)
    return total.tobytes()
