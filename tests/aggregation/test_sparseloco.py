"""`sparseloco`: the largest values of each chunk, what is left of them, and how long a federation must be for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from facility.exchange.checkpoints.codecs import PART, sparseloco
from facility.exchange.checkpoints.codecs.sparseloco import CHUNK, KEPT, decode, encode, fields, kept_of, streams_of
from facility.exchange.checkpoints.delta import decode_update as decode_message
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.delta_codecs import declared_codec
from facility.exchange.errors import CheckpointError
from facility.exchange.messages.settings import TrainingSettings
from facility.rounds.smaller import make_smaller, residual_path, residual_to_resume
from tests.aggregation import make

FADING, SHARE = declared_codec("sparseloco").fading, 0.25
SETTINGS = TrainingSettings(encoding="sparseloco", export_dtype="float32", unsent_share=SHARE)


def by_hand(values: np.ndarray) -> np.ndarray:
    """Chunk by chunk and value by value, as the paper says it; of equal magnitudes any may be taken."""
    out = np.zeros_like(values)
    for start in range(0, len(values), CHUNK):
        chunk = values[start : start + CHUNK]
        order = sorted(range(len(chunk)), key=lambda place: abs(float(chunk[place])))[-kept_of(len(chunk)) :]
        smaller, larger = order[: len(order) // 2], order[len(order) // 2 :]
        for half in (smaller, larger):
            if half:
                mean = torch.tensor(np.mean([abs(float(chunk[place])) for place in half])).to(torch.bfloat16)
                for place in half:
                    out[start + place] = np.copysign(np.float32(mean.float().item()), chunk[place])
    return out


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 2 * CHUNK + 7), seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-30, 1e-5, 1.0, 1e30])
)
def test_what_arrives_is_what_the_paper_sends(count: int, seed: int, scale: float):
    rng = np.random.default_rng(seed)  # no two magnitudes are equal: of such any may be taken
    values = (scale * rng.permutation(np.linspace(0.01, 1, count)) * rng.choice([-1, 1], count)).astype(np.float32)
    stored = encode(values)
    assert {name: (len(stored[name]), stored[name].itemsize) for name, _, _ in fields(count, 0)} == {
        "code": (fields(count, 0)[0][2], 1),
        "level": (fields(count, 0)[1][2], 2),
    }
    found, wanted = decode(stored, count), by_hand(values)
    assert np.count_nonzero(found) == np.count_nonzero(wanted)
    np.testing.assert_allclose(found, wanted, rtol=8e-3)  # the mean may lie on the border of two bfloat16 numbers
    np.testing.assert_array_equal(np.signbit(found), np.signbit(np.where(found != 0, values, 0)))


@pytest.mark.parametrize(
    "values", [np.zeros(CHUNK), np.full(CHUNK, -2.0), np.eye(1, CHUNK, 7)[0]], ids=["0", "-2", "one"]
)
def test_ties_and_zeros(values: np.ndarray):
    found = decode(encode(values.astype(np.float32)), CHUNK)
    if values.any() and not values.all():
        assert found[7] == pytest.approx(1 / (KEPT // 2), rel=1e-2), "the mean of its half"
    else:
        assert set(np.unique(found)) <= {0.0, values[0]} and np.count_nonzero(found) == (KEPT if values.any() else 0)


def test_a_message_takes_less_than_15_thousandths_of_bfloat16():
    per_value = sum(length * {"U8": 1, "BF16": 2}[dtype] for _, dtype, length in fields(PART, 0)) / PART
    assert per_value == declared_codec("sparseloco").bytes_per_value <= 0.015 * 2
    assert sum(streams_of(CHUNK)) == -(-(KEPT + 128) // 8) + -(-5 * KEPT // 8) + 2 * -(-KEPT // 8)


def broken(code: np.ndarray, how: str) -> dict[str, np.ndarray]:
    level = np.full(2, 0x3F80, np.uint16)
    high, low, _, _ = streams_of(CHUNK)
    if how == "fewer places":
        code[:high] = 0
    elif how == "more places":
        code[:high] = 0xFF
    elif how == "past the end":
        code[:high] = 0
        code[high - KEPT // 8 : high] = 0xFF  # the last bits: a rest of 128, which is 4,096
    elif how == "twice the same":
        code[:high] = 0
        code[: KEPT // 8] = 0xFF  # every rest is 0
        code[high : high + low] = 0
    else:
        level[1] = {"NaN": 0x7FC0, "infinity": 0xFF80, "negative": 0xBF80}[how]
    return {"code": code, "level": level}


@pytest.mark.parametrize(
    "how", ["fewer places", "more places", "past the end", "twice the same", "NaN", "infinity", "negative"]
)
def test_what_no_encoder_writes_is_refused(how: str):
    values = np.random.default_rng(0).standard_normal(CHUNK).astype(np.float32)
    with pytest.raises(ValueError, match="places|magnitude|scale"):
        decode(broken(encode(values)["code"], how), CHUNK)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.sampled_from([1, 40, CHUNK, CHUNK + 100]))
def test_any_bytes_are_values_or_an_error(seed: int, count: int):
    rng = np.random.default_rng(seed)
    stored = encode(rng.standard_normal(count).astype(np.float32))
    for array in stored.values():
        place = rng.integers(len(array))
        array[place] ^= array.dtype.type(1 << int(rng.integers(8 * array.itemsize)))
    try:
        found = decode(stored, count)
    except ValueError:
        return
    assert len(found) == count and np.isfinite(found).all() and np.count_nonzero(found) <= kept_of(count) + KEPT


@pytest.mark.parametrize("built_in", [True, False], ids=["trained from a share of it", "by a trainer of one's own"])
def test_what_is_left_fades_and_is_sent_later(tmp_path: Path, built_in: bool):
    """Four rounds against the paper's algorithm on whole arrays; every round is tried twice, as after a kill. Where
    training begins has no part in what is sent of its step."""
    state = tmp_path / "state"
    start: dict[str, Any] = {"w": torch.zeros(3, CHUNK), "still": torch.ones(50)}
    error = np.zeros(3 * CHUNK, np.float32)
    for number in range(4):
        base = make.model(tmp_path / f"base{number}", start, round=number)
        ahead = residual_to_resume(state, number, SETTINGS, built_in=built_in)
        assert (ahead is not None) == (built_in and number > 0)
        begun = start["w"] + SHARE * make.read_all(ahead)["w"] if ahead is not None else start["w"]
        step = 1e-2 * torch.randn(3, CHUNK, generator=torch.Generator().manual_seed(number))
        trained = begun + step
        for _ in range(2):
            update = make.update(tmp_path / "update", {**start, "w": trained}, base=base, facility="alpha")
            more: dict[str, Any] = dict(settings=SETTINGS, patterns=Patterns(), built_in=built_in)
            make_smaller(update, model=base, state=state, round=number, **more)
            update = update.rename(tmp_path / f"message{number}-{_}")
        decode_message(update, reference=base, out=tmp_path / f"decoded{number}")
        error = np.float32(FADING) * error + step.numpy().reshape(-1)
        sent = np.concatenate([decode(encode(part), CHUNK) for part in error.reshape(3, CHUNK)])
        got = make.read_all(tmp_path / f"decoded{number}")["w"] - start["w"]
        np.testing.assert_allclose(got.numpy().reshape(-1), sent, atol=1e-7)
        error = error - sent
        left = make.read_all(residual_path(state, number))
        np.testing.assert_allclose(left["w"].numpy().reshape(-1), error, atol=1e-7)
        start = {**start, "w": start["w"] + got}


def test_a_tensor_that_rests_sends_what_was_left_of_it(tmp_path: Path):
    start: dict[str, Any] = {"w": torch.zeros(CHUNK)}
    base = make.model(tmp_path / "base0", start)
    moved = {"w": torch.linspace(-1, 1, CHUNK)}
    for number, tensors in enumerate((moved, start)):
        base = make.model(tmp_path / f"base{number + 1}", start, round=number)
        update = make.update(tmp_path / f"update{number}", tensors, base=base, facility="alpha")
        make_smaller(update, model=base, state=tmp_path / "s", round=number, settings=SETTINGS, patterns=Patterns())
        decode_message(update, reference=base, out=tmp_path / f"decoded{number}")
        assert np.count_nonzero(make.read_all(tmp_path / f"decoded{number}")["w"].numpy()) == KEPT


def test_a_residual_of_another_model_is_an_error(tmp_path: Path):
    for number, shape in enumerate(((CHUNK,), (2, CHUNK))):
        start: dict[str, Any] = {"w": torch.zeros(shape)}
        base = make.model(tmp_path / f"base{number}", start, round=number)
        update = make.update(tmp_path / f"update{number}", make.moved(start, 1), base=base, facility="alpha")
        more: dict[str, Any] = dict(model=base, state=tmp_path / "s", settings=SETTINGS, patterns=Patterns())
        if number:
            with pytest.raises(CheckpointError, match=r"'w' is F32 \[4096\], expected F32 \[2, 4096\]"):
                make_smaller(update, round=number, **more)
        else:
            make_smaller(update, round=number, **more)
    assert sparseloco.DECLARATION.least_rounds == 100
