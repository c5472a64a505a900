"""Known answers: published vectors of AES-256 in counter mode, numbers worked by hand, and laws of secret sharing."""

from __future__ import annotations

import hashlib
from itertools import combinations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from hypothesis import given, settings
from hypothesis import strategies as st

from facility.exchange.checkpoints import native
from facility.exchange.errors import InputError
from facility.exchange.masking import key_stream
from facility.exchange.masking.fixed_point import fixed_point
from facility.exchange.masking.key_stream import BLOCK, KeyStream
from facility.exchange.masking.shamir import interpolate, split_secret, times
from facility.exchange.masking.shares import commit_to_seed
from facility.exchange.masking.streams import UNSIGNED, MaskBuffer, places_of
from facility.exchange.masking.weights import scale_weights

# NIST SP 800-38A, F.5.5 (CTR-AES256.Encrypt): key, and the output blocks of counters f0f1...ff, f0f1...ff + 1.
KEY = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
COUNTER = 0xF0F1F2F3F4F5F6F7F8F9FAFBFCFDFEFF
BLOCKS = "0bdf7df1591716335e9a8b15c860c502", "5a6e699d536119065433863c8f657b94"


@pytest.mark.parametrize("bits", [16, 32])
def test_streams_are_aes_256_in_counter_mode(bits: int):
    buffer, per_block = MaskBuffer(64, bits), 128 // bits
    found = buffer.read(KEY, COUNTER * per_block, 2 * per_block)
    assert found.tobytes().hex() == "".join(BLOCKS)


@settings(max_examples=50, deadline=None)
@given(start=st.integers(0, 1000), count=st.integers(1, 200), bits=st.sampled_from([16, 32]))
def test_a_stream_is_the_same_in_pieces(start: int, count: int, bits: int):
    whole = MaskBuffer(1200, bits).read(KEY, 0, 1200).copy()
    assert np.array_equal(MaskBuffer(200, bits).read(KEY, start, count), whole[start : start + count])


@settings(max_examples=50, deadline=None)
@given(
    galois=st.booleans(),
    ends=st.integers(4, 200),
    reads=st.lists(st.tuples(st.sampled_from(["on", "gap", "anywhere", "begin"]), st.integers(1, 900)), min_size=1),
)
def test_both_implementations_give_one_stream(galois: bool, ends: int, reads: list[tuple[str, int]]):
    """Reads in a row, over the small gaps between tensors, back to the begin, and over the end of the 32-bit counter
    (here after `ends` blocks), are pieces of what AES in counter mode gives in one call."""
    whole = Cipher(AES(KEY), CTR(bytes(BLOCK))).encryptor().update(bytes(20_000))
    stream, at, zeros = KeyStream(KEY), 0, memoryview(bytes(900))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_stream, "galois_is_faster", lambda: galois)
        patch.setattr(key_stream, "GALOIS_ENDS", ends * BLOCK)
        for where, count in reads:
            at = {"on": at, "gap": at + count % 64, "anywhere": at * 7919 % 15_000, "begin": 0}[where] % 19_000
            space = memoryview(bytearray(count + BLOCK))
            stream.write(space, at, zeros[:count])
            assert space[:count] == whole[at : at + count]
            at += count


def test_galois_counter_mode_ends_where_its_standard_says():
    """SP 800-38D, section 5.2.1.1: at most 2^39 - 256 bits under one nonce, after the two blocks before."""
    assert 8 * (key_stream.GALOIS_ENDS - key_stream.HEAD) == 2**39 - 256


def test_tensors_never_share_a_cipher_block():
    assert places_of({"b": 1, "a": 17, "c": 16}) == {"a": 0, "b": 32, "c": 48}


def test_products_in_the_field_of_aes():
    """FIPS 197, section 4.2: {57} x {83} = {c1}, {57} x {13} = {fe}."""
    assert int(times(np.array([0x57], np.uint8), 0x83)[0]) == 0xC1
    assert int(times(np.array([0x57], np.uint8), 0x13)[0]) == 0xFE


def test_a_line_worked_by_hand():
    """f(x) = 42 + 7 x over GF(256): f(1) = 2d, f(2) = 24 (hexadecimal: 2a + 07 = 2d; 2a + 0e = 24)."""
    assert interpolate({1: b"\x2d", 2: b"\x24"}) == b"\x2a"


@settings(max_examples=30, deadline=None)
@given(secret=st.binary(min_size=32, max_size=32), count=st.integers(2, 7), data=st.data())
def test_every_threshold_of_shares_gives_the_secret_and_the_others(secret: bytes, count: int, data: st.DataObject):
    threshold = data.draw(st.integers(1, count))
    shares = dict(enumerate(split_secret(secret, count=count, threshold=threshold), start=1))
    for points in combinations(shares, threshold):
        chosen = {point: shares[point] for point in points}
        assert interpolate(chosen) == secret
        assert all(interpolate(chosen, at=point) == share for point, share in shares.items())


def test_fewer_shares_fit_every_secret():
    """Two of three shares of one byte, threshold three: each secret is reached by exactly one third share."""
    shares = split_secret(b"\x99", count=3, threshold=3)
    reached = {interpolate({1: shares[0], 2: shares[1], 3: bytes([third])}) for third in range(256)}
    assert len(reached) == 256


def test_shares_of_different_lengths_are_refused():
    with pytest.raises(InputError, match="different lengths"):
        interpolate({1: b"a", 2: b"bc"})


@pytest.mark.skipif(native.library() is None, reason="no C compiler here")
@pytest.mark.parametrize("bits", [16, 32])
def test_compiled_fixed_point_is_numpys_bit_for_bit(bits: int, monkeypatch: pytest.MonkeyPatch):
    """Values within the clip, at it and beyond, of both signs, zeros and subnormal numbers."""
    point = fixed_point(bits, 0.01, {"a": 1.0, "b": 0.7, "c": 0.3})
    step = np.random.default_rng(3).normal(0, 4e-3, 5000).astype(np.float32)
    step[:8] = [0.0, -0.0, 0.01, -0.01, 3.0, -3.0, 1e-40, np.float32(0.01) * 1.0000001]
    rests = np.empty((2, 5000), np.float32)
    found = point.encode(step, 0.7, rests[0], np.empty(5000, UNSIGNED[bits]))
    monkeypatch.setattr(native, "library", lambda: None)
    assert np.array_equal(found, point.encode(step, 0.7, rests[1]))
    assert np.array_equal(rests[0].view(np.uint32), rests[1].view(np.uint32))


@settings(max_examples=30, deadline=None)
@given(reads=st.lists(st.tuples(st.booleans(), st.integers(0, 500), st.integers(1, 100)), min_size=1, max_size=8))
def test_a_stream_goes_on_where_it_was_or_elsewhere(reads: list[tuple[bool, int, int]]):
    """One buffer that keeps its ciphers gives what a new one gives, for reads in a row and for jumps, of two seeds."""
    kept, at = MaskBuffer(100, 16), {}
    for jump, start, count in reads:
        for seed in (KEY, KEY[::-1]):
            start = start if jump else at.get(seed, 0)
            assert np.array_equal(kept.read(seed, start, count), MaskBuffer(100, 16).read(seed, start, count))
            at[seed] = start + count


def test_a_commitment_is_what_the_protocol_says():
    text = b"crossfed seed\n" + b"0" * 64 + b"\nalpha\nbeta\n" + KEY
    assert commit_to_seed("0" * 64, "alpha", "beta", KEY) == hashlib.sha256(text).hexdigest()


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([16, 32]),
    weights=st.lists(st.floats(1e-3, 1), min_size=2, max_size=16),
    clip=st.floats(1e-6, 10),
)
def test_no_sum_wraps_even_where_every_value_is_at_the_clip(bits: int, weights: list[float], clip: float):
    point = fixed_point(bits, clip, {str(i): weight for i, weight in enumerate(weights)})
    for sign in (1, -1):
        total = np.zeros(3, f"<u{bits // 8}")
        for weight in weights:
            total += point.encode(np.full(3, 3 * sign * clip, np.float32), weight, np.empty(3, np.float32))
        mean = np.empty(3, np.float64)
        point.decode(total, sum(weights), mean)
        assert np.allclose(mean, sign * clip, rtol=0, atol=point.scale * len(weights) / sum(weights))


def test_scaled_weights_have_one_as_their_largest():
    assert scale_weights({"a": 10, "b": 30}, 1.0) == {"a": pytest.approx(1 / 3), "b": 1.0}
