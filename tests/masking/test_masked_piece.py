"""One pass over a piece gives the bits of the passes that it stands for, with a compiler and without."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.checkpoint import open_checkpoint, save_tensors
from facility.exchange.checkpoints.codecs import PART
from facility.exchange.checkpoints.delta_parts import READ
from facility.exchange.masking.fixed_point import fixed_point
from facility.exchange.masking.streams import SIGNED, UNSIGNED, MaskBuffer, places_of
from facility.masking.mask_update import CACHE_BYTES, MaskedTensors, piece_of
from facility.masking.masked_piece import RESTS, Masker, Stored, count_clipped
from facility.rounds import held
from facility.rounds.sealed import write_seal
from facility.rounds.smaller import pending_residual

COUNT, PLACE = 1337, 32
"""Elements: more than two runs of the C code, and no multiple of its lanes."""
MASKS = [(1, b"o" * 32), (-1, b"a" * 32), (1, b"b" * 32), (-1, b"c" * 32)]
UNSIGNED_TORCH = {16: torch.uint16, 32: torch.uint32}
STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def stored(dtype: str, values: np.ndarray) -> Stored:
    """BF16 is kept as the upper halves of float32."""
    if dtype == "BF16":
        return Stored(values=(values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16), dtype=dtype)
    return Stored(values=values.astype(STORED[dtype]), dtype=dtype)


def widened(one: Stored) -> np.ndarray:
    if one.dtype == "BF16":
        return (one.values.astype(np.uint32) << 16).view(np.float32)
    return one.values.astype(np.float32)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("factor", [1.0, 0.37])
@pytest.mark.parametrize(
    ("update", "base"), [("F32", "BF16"), ("F32", "F32"), ("F32", None), ("BF16", "BF16"), ("F16", "F16")]
)
def test_one_pass_is_the_passes_one_by_one(
    monkeypatch: pytest.MonkeyPatch, update: str, base: str | None, factor: float, bits: int
):
    random = np.random.default_rng(7)
    point = fixed_point(bits, 2e-3, {"a": 1.0, "b": 0.25, "c": 1.0})
    before = stored(base, random.normal(0, 0.02, COUNT)) if base else None
    step = random.normal(0, 1e-3, COUNT)  # some are beyond the clip
    after = stored(update, (widened(before) if before else 0) + step)
    found = {}
    for way in ("compiled", "passes"):
        if way == "passes":
            monkeypatch.setattr(native, "library", lambda: None)
        masker = Masker(MASKS, piece=COUNT, bits=bits, weight=0.25, factor=factor)
        sent, rest, squared = masker.mask(after, before, point, PLACE)
        found[way] = sent.copy(), rest.copy(), squared
    assert np.array_equal(found["compiled"][0], found["passes"][0])
    assert found["compiled"][1].dtype == found["passes"][1].dtype == {16: np.uint16, 32: np.float32}[bits]
    assert found["compiled"][1].tobytes() == found["passes"][1].tobytes()
    assert found["compiled"][2] == pytest.approx(found["passes"][2], rel=1e-5)

    whole = (widened(after) - widened(before) if before else widened(after)) * np.float32(factor)
    units = np.rint(np.clip(whole.astype(np.float64), -point.clip, point.clip) * (0.25 / point.scale))
    rest = widened(Stored(values=found["compiled"][1], dtype=RESTS[bits]))
    left = whole.astype(np.float64) - units * (point.scale / 0.25)
    assert np.all(np.abs(rest - left) <= np.abs(left) * 2.0 ** {16: -8, 32: -24}[bits])
    total = units.astype(np.int64)
    for sign, seed in MASKS:
        total = total + sign * MaskBuffer(COUNT, bits).read(seed, PLACE, COUNT).astype(np.int64)
    assert np.array_equal(found["compiled"][0], (total % 2**bits).astype(UNSIGNED[bits]))


@pytest.mark.parametrize("bits", [16, 32])
def test_what_the_clip_cut_off_is_counted(bits: int):
    point = fixed_point(bits, 2e-3, {"a": 1.0, "b": 0.25, "c": 1.0})
    step = stored("F32", np.random.default_rng(7).normal(0, 1e-3, COUNT))
    masker = Masker(MASKS, piece=COUNT, bits=bits, weight=0.25, factor=1.0)
    _, rest, _ = masker.mask(step, None, point, PLACE)
    unit = point.scale / 0.25
    assert count_clipped(rest, unit) == np.count_nonzero(np.abs(step.values) > point.clip + unit) > COUNT // 30
    np.clip(step.values, -0.999 * point.clip, 0.999 * point.clip, out=step.values)
    assert count_clipped(masker.mask(step, None, point, PLACE)[1], unit) == 0


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_the_sum_of_squares(odd: float):
    values = np.zeros(COUNT)
    values[700] = odd
    masker = Masker(MASKS, piece=COUNT, bits=16, weight=1.0, factor=1.0)
    point = fixed_point(16, 1e-3, dict.fromkeys("abc", 1.0))
    assert not math.isfinite(masker.mask(stored("F32", values), None, point, 0)[2])


def test_streams_read_together_are_those_read_alone():
    """In any order of places, a row each."""
    seeds = [seed for _, seed in MASKS]
    together = MaskBuffer(64, 16, rows=4)
    for place in (0, 64, 128, 32, 1600):
        rows = together.read_all(seeds, place, 50).copy()
        assert all(
            np.array_equal(row, MaskBuffer(64, 16).read(seed, place, 50)) for row, seed in zip(rows, seeds, strict=True)
        )


@pytest.mark.parametrize("bits", [16, 32])
def test_however_many_values_are_masked_at_a_time_the_bits_are_the_same(bits: int):
    random = np.random.default_rng(11)
    point = fixed_point(bits, 2e-3, {"a": 1.0, "b": 0.25, "c": 1.0})
    values = random.normal(0, 1e-3, 4096).astype(np.float32)
    found = []
    for piece in (256, 1024, 4096):
        masker = Masker(MASKS, piece=piece, bits=bits, weight=0.25, factor=0.5)
        pieces = []
        for start in range(0, len(values), piece):
            part = Stored(values=values[start : start + piece], dtype="F32")
            sent, rest, _ = masker.mask(part, None, point, PLACE + start)
            pieces.append((sent.copy(), rest.copy()))
        found.append([b"".join(one.tobytes() for one in side) for side in zip(*pieces, strict=True)])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("bits", [16, 32])
def test_a_piece_of_many_streams_is_smaller_and_never_less_than_the_files_are_cut_into(bits: int):
    sizes = [piece_of(streams, bits) for streams in range(1, 300)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == READ and sizes[-1] == PART
    assert all(READ % size == 0 and size % PART == 0 for size in sizes), "no piece crosses a part's end"
    assert all(size == PART or streams * size * bits // 8 <= CACHE_BYTES for streams, size in enumerate(sizes, start=1))


@pytest.mark.parametrize("bits", [16, 32])
def test_masks_come_off_a_tensor_of_many_pieces_as_off_one_of_a_single(tmp_path: Path, monkeypatch, bits: int):
    """What is held of large tensors is read, unmasked and written piece by piece, each at its own place."""
    monkeypatch.setattr(held, "READ", 48)
    counts, drawn = {"a": 20, "b": 333, "new": 100}, np.random.default_rng(bits)
    units, places = {"a": 0.5, "b": 1e-3, "new": 2.0}, places_of(counts)
    steps = {name: drawn.integers(-99, 99, count).astype(SIGNED[bits]) for name, count in counts.items()}
    sent = {name: step.view(UNSIGNED[bits]).copy() for name, step in steps.items()}
    for name, numbers in sent.items():
        for sign, seed in MASKS:
            MaskBuffer(1000, bits).add_to(numbers, sign, seed, places[name])
    rest = {name: torch.from_numpy(drawn.normal(size=count).astype(np.float32)) for name, count in counts.items()}
    base = {name: torch.from_numpy(drawn.normal(size=counts[name])).bfloat16() for name in ("a", "b")}
    kept = held.Held(
        place=tmp_path / "held",
        round=0,
        roster="",
        bits=bits,
        masked=MaskedTensors(masks=MASKS, units=units, sent={}, left={"model.safetensors": "its checksum"}),
    )
    pending = pending_residual(tmp_path)
    of_numbers = {
        name: torch.from_numpy(one.view(SIGNED[bits])).view(UNSIGNED_TORCH[bits]) for name, one in sent.items()
    }
    for place, tensors in ((kept.sent, of_numbers), (pending, rest), (tmp_path / "base", base)):
        place.mkdir(parents=True)
        save_tensors(place, tensors.items())
    write_seal(pending, kept.masked.left)
    (out := tmp_path / "out").mkdir()
    assert held.take_off(tmp_path, kept, open_checkpoint(tmp_path / "base"), out) == len(counts)
    found = open_checkpoint(out)
    for name, step in steps.items():
        exact = step * units[name] + rest[name].double().numpy()
        exact += base[name].double().numpy() if name in base else 0
        assert np.array_equal(found.read(name).numpy(), exact.astype(np.float32)), name
