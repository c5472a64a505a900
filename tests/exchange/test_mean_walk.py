"""The 8-bit form of the mean walk: torch's E4M3, to the nearest, and nothing else is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from facility.exchange.checkpoints.mean_walk import FOLDER, byte_values, metadata_of, open_mean_walk, round_to_bytes
from facility.exchange.errors import CheckpointError


def test_the_bytes_are_those_of_torchs_e4m3_and_every_value_survives():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    assert np.array_equal(byte_values() * 64, codes.float().numpy(), equal_nan=True)
    finite = byte_values()[np.isfinite(byte_values())]
    assert np.array_equal(byte_values()[round_to_bytes(finite)], finite)


def test_values_are_rounded_to_the_nearest_and_large_ones_are_cut():
    walk = np.random.default_rng(0).normal(size=5000).astype(np.float32) * np.float32(10) ** np.linspace(-6, 1, 5000)
    halves = (torch.from_numpy(walk) * 64).clamp(-448, 448).half().float()
    assert np.array_equal(byte_values()[round_to_bytes(walk)] * 64, halves.to(torch.float8_e4m3fn).float().numpy())
    assert byte_values()[round_to_bytes(np.float32([1e9, -1e9, 7.0]))].tolist() == [7.0, -7.0, 7.0]


@pytest.mark.parametrize("rounds", ["[]", '{"a": -1}', '{"a": true}', '{"a": 1.5}', "{", '{"a": "1"}'])
def test_metadata_that_is_no_round_by_facility_is_refused(tmp_path: Path, rounds: str):
    tensors = {"w": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    (tmp_path / FOLDER).mkdir()
    save_file(tensors, tmp_path / FOLDER / "model.safetensors", metadata={"rounds": rounds})
    with pytest.raises(CheckpointError, match="round by facility"):
        open_mean_walk(tmp_path)


def test_a_walk_of_another_dtype_is_refused(tmp_path: Path):
    (tmp_path / FOLDER).mkdir()
    save_file({"w": torch.zeros(2)}, tmp_path / FOLDER / "model.safetensors", metadata=metadata_of({"a": 0}))
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        open_mean_walk(tmp_path)
