"""The first step finds damage before a job is submitted, says how to go back, and going back works."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.archive.rewind import rewind
from coordinator.archive.rounds import Archive
from coordinator.config.settings import CoordinatorSettings
from coordinator.steps.start import start
from facility.exchange.errors import CheckpointError
from tests.aggregation.updates import write_update
from tests.pico import save_pico
from tests.steps.test_aggregate_step import close

SETTINGS = CoordinatorSettings(federation="f", rounds=3, facilities=["a"])


@pytest.fixture
def two_rounds(tmp_path: Path) -> Archive:
    archive = Archive(tmp_path / "archive")
    model, _, _ = start(archive, save_pico(tmp_path / "model", dtype="bfloat16"), SETTINGS)
    for number in range(2):
        update = write_update(tmp_path / f"a{number}", model, "a", move=0.02, round=number)
        model, _, _ = close(archive, model, [update], SETTINGS, number)
    return archive


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("part", ["model/*.safetensors", "state/master/*.safetensors", "state/velocity/*.safetensors"])
def test_one_damaged_bit_is_named_with_the_way_back(part: str, two_rounds: Archive, tmp_path: Path):
    files = sorted(two_rounds.round_directory(1).glob(part))
    if not files and "velocity" in part:
        files = sorted(two_rounds.round_directory(1).glob("state/*/*.safetensors"))[-1:]
    original = files[0].read_bytes()
    flip(files[0])
    with pytest.raises(CheckpointError, match=rf"{files[0].name}.*crossfed rewind --to 1"):
        start(two_rounds, tmp_path / "model", SETTINGS)
    files[0].write_bytes(original)
    assert start(two_rounds, tmp_path / "model", SETTINGS)[1:] == (2, True), "restored: the same command goes on"
    flip(files[0])
    rewind(two_rounds, 1)
    assert start(two_rounds, tmp_path / "model", SETTINGS) == (two_rounds.model_for(1), 1, True)
