"""Moments that travel value by value: every form gives back what it promises, and misfits are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from facility.exchange.checkpoints.moments import (
    BLOCKS,
    FIRST,
    FOLDER,
    FULL,
    INT8,
    Moment,
    StoredMoments,
    block_means,
    decoded,
    encoded,
    sent_bytes,
    spread,
)
from facility.exchange.errors import CheckpointError
from tests.examples import examples
from tests.moments import write_values

SHAPES = {"a.weight": (6, 150), "conv.weight": (3, 2, 2), "b.bias": (5,)}


def values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Second moments over twenty octaves, some of them zero."""
    rng = np.random.default_rng(seed)
    found = np.exp2(-20 * rng.random(shape)).astype(np.float32)
    found[rng.random(shape) < 0.1] = 0
    return found


@settings(max_examples=examples(50), deadline=None)
@given(rows=st.integers(1, 5), width=st.integers(1, 200), seed=st.integers(0, 999))
def test_a_byte_a_value_keeps_every_value_within_four_and_a_half_percent(rows: int, width: int, seed: int):
    wanted = values((rows, width), seed)
    found = decoded(INT8, encoded(INT8, wanted))
    assert np.array_equal(found == 0, wanted == 0)
    there = wanted > 0
    assert np.abs(found[there] / wanted[there] - 1).max(initial=0) < 0.045
    assert np.array_equal(found.max(axis=1), wanted.max(axis=1))  # the largest of a row is exact


def test_what_is_far_below_the_largest_is_never_zero():
    """A step is divided by the root: a second moment that is rounded to nothing would make it endless."""
    found = decoded(INT8, encoded(INT8, np.array([[1.0, 1e-20]], np.float32)))
    assert found[0, 1] == np.float32(2.0**-31.75)


@settings(max_examples=examples(50), deadline=None)
@given(rows=st.integers(1, 4), width=st.integers(1, 300), seed=st.integers(0, 999))
def test_a_block_is_the_mean_of_its_values_by_a_plain_loop(rows: int, width: int, seed: int):
    wanted = values((rows, width), seed)
    found = block_means(wanted)
    for row in range(rows):
        for block, first in enumerate(range(0, width, 64)):
            part = wanted[row, first : first + 64]
            assert np.isclose(found[row, block], part.mean(), rtol=1e-5)
            assert (spread(found, width)[row, first : first + 64] == found[row, block]).all()


def test_first_moments_are_rounded_as_torch_does():
    wanted = np.random.default_rng(0).standard_normal((4, 7)).astype(np.float32) * 1e-4
    expected = torch.from_numpy(wanted).bfloat16().float().numpy()
    assert np.array_equal(decoded(FIRST, encoded(FIRST, wanted)), expected)


def written(directory: Path) -> dict[Moment, np.ndarray]:
    """Every form of a parameter of its own, and a first moment of each; returns them as they are stored."""
    directory.mkdir()
    found = {}
    for name, form in (("a.weight", INT8), ("conv.weight", FULL), ("a.weight", FIRST), ("b.bias", FIRST)):
        moment = Moment(name=name, form=form, shape=SHAPES[name])
        found[moment] = values((moment.rows, moment.width), len(found))
    return write_values(directory, found, steps=7, kept=0.5)


@pytest.mark.parametrize("piece", [1 << 22, 300, 1])
def test_what_is_written_is_what_is_read_in_pieces_of_any_size(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("facility.exchange.checkpoints.moments.PIECE_VALUES", piece)
    wanted = written(tmp_path / "u")
    stored = StoredMoments(tmp_path / "u", SHAPES)
    assert stored.steps == 7 and stored.kept == 0.5 and {*stored.moments.values()} == {*wanted}
    stored.check()
    for moment, exact in wanted.items():
        assert stored.has(moment)
        assert np.array_equal(stored.whole(moment, 0, moment.rows), exact)
        assert np.array_equal(stored.whole(moment, 2, 1), exact[2:3])
        size = np.linalg.norm(exact) if moment.form == FIRST else exact.mean()
        assert np.isclose(stored.size_of(moment), size, rtol=1e-6)


def test_bytes_that_are_told_are_those_of_the_tensors(tmp_path: Path):
    written(tmp_path / "u")
    stored = StoredMoments(tmp_path / "u", SHAPES)
    tensors = stored.checkpoint.tensors.values()
    assert sum(entry.elements * {"BF16": 2, "F32": 4, "U8": 1}[entry.dtype] for entry in tensors) == sum(
        moment.bytes for moment in stored.moments.values()
    )
    shapes = [(100, 640), (100,)]
    assert sent_bytes(shapes) == 4 * (100 + 640) + 400
    assert sent_bytes(shapes, form=BLOCKS) == 4 * 100 * 10 + 400
    assert sent_bytes(shapes, form=INT8) == 64_000 + 400 + 400
    assert sent_bytes(shapes, shapes, form=FULL) == 4 * 64_000 + 400 + 2 * 64_100
    assert sent_bytes([], shapes[1:]) == 200 and sent_bytes([]) == 0


BAD = {
    "of no parameter": {"other::full": np.ones((6, 150), np.float32)},
    "no moment": {"a.weight": np.ones((6, 150), np.float32)},
    "another shape": {"a.weight::full": np.ones((6, 149), np.float32)},
    "another dtype": {"a.weight::full": np.ones((6, 150), np.float64)},
    "codes without their scale": {"a.weight::codes": np.ones((6, 150), np.uint8)},
    "two forms": {"a.weight::full": np.ones((6, 150), np.float32), "a.weight::blocks": np.ones((6, 3), np.float32)},
    "a vector's second moment": {"b.bias::full": np.ones((5, 1), np.float32)},
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_moment_of_a_parameter_is_refused(what: str, tmp_path: Path):
    (tmp_path / FOLDER).mkdir()
    save_file(BAD[what], tmp_path / FOLDER / "model.safetensors", {"steps": "3"})
    with pytest.raises(CheckpointError):
        StoredMoments(tmp_path, SHAPES)


@pytest.mark.parametrize("steps", ["-1", "nan", "many", "1e13"])
def test_steps_that_cannot_be_are_refused(steps: str, tmp_path: Path):
    (tmp_path / FOLDER).mkdir()
    save_file(
        {"a.weight::full": np.ones((6, 150), np.float32)}, tmp_path / FOLDER / "model.safetensors", {"steps": steps}
    )
    with pytest.raises(CheckpointError, match="steps"):
        StoredMoments(tmp_path, SHAPES)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_values_that_no_second_moment_has_are_refused(value: float, tmp_path: Path):
    (tmp_path / FOLDER).mkdir()
    bad = np.ones((6, 150), np.float32)
    bad[5, 149] = value
    save_file({"a.weight::full": bad}, tmp_path / FOLDER / "model.safetensors", {"steps": "3"})
    with pytest.raises(CheckpointError, match="no moment has"):
        StoredMoments(tmp_path, SHAPES).check()
