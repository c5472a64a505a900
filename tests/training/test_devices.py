"""Laws of the devices that ranks find."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from facility.exchange.errors import ConfigurationError
from facility.training.devices import check_own_gpus
from tests.pico import save_pico
from tests.training.federation import train, write_dataset, write_settings

NORTH, SOUTH = ("north", "1", "NVIDIA H100"), ("south", "1", "NVIDIA H100")


def test_gpus_of_their_own_are_told_by_host_and_uuid():
    check_own_gpus([NORTH, ("north", "2", "NVIDIA H100"), SOUTH])


def test_two_ranks_on_one_gpu_are_named():
    with pytest.raises(
        ConfigurationError, match=r"ranks 1 and 2 found one GPU .*NVIDIA H100 of north.*training\.ranks"
    ):
        check_own_gpus([SOUTH, NORTH, NORTH])


@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs exactly one GPU")
def test_two_ranks_on_the_only_gpu_end_with_that_sentence(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    settings = write_settings(tmp_path / "settings.json", device="auto")
    for process in train(tmp_path / "out", model, dataset, settings, ranks=2, expect=None):
        assert process.returncode not in (0, 75), process.stderr
        assert "ranks 0 and 1 found one GPU between them" in process.stderr
